"""The settings that algorithms read: each key declared once, with its type, its range and its default.

The defaults are the paper's values (§4.1) where the paper gives one. These are plain frozen dataclasses, since a
client's process gets them with its step and should not have to import pydantic; ``experiment/sections.py`` has pydantic
check what a job file says against them. The settings of a single method stand beside it in ``methods.py``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Lt

from qdsim.algorithms.server import MEAN, Server
from qdsim.ranges import NotNegative, Positive, Rate, Share

if TYPE_CHECKING:  # a job is checked without torch
    from qdsim.models.model import Model


@dataclass(frozen=True)
class Stage:
    """One phase's federated SGD: how many rounds, and what a client does in each."""

    rounds: NotNegative
    """Rounds of the phase; 0 leaves it out."""
    steps: Positive = 50
    """T, local steps of a client in a round."""
    batch_size: Positive = 256
    """|B|; a client with fewer samples takes all of them."""
    lr: Rate = 0.01
    """η_θ."""
    participation: Share = 1.0
    """Share of the clients with non-empty Z_i that are drawn in each round."""
    stop: Literal["rounds", "converged", "loss"] = "rounds"
    """``rounds``: after so many. ``converged``: ``rounds`` is the most, and the rule of ``algorithms/stopping.py`` ends
    the phase before. ``loss``, in recovery only: the same by the clients' own losses."""
    proximal: Annotated[float, Ge(0)] = 0.0
    """μ of FedProx: each local step also pulls θ back to the round's model, as μ/2 |θ - θ_round|² would; 0: FedAvg."""


@dataclass(frozen=True)
class Train(Stage):
    """FL training with in-situ distillation (Algorithm 2)."""

    rounds: Positive = 200
    """K."""
    stop: Literal["rounds", "converged"] = "rounds"


@dataclass(frozen=True)
class Unlearn(Stage):
    """Gradient ascent on the forget set (Algorithm 1)."""

    rounds: Positive = 1
    """One round suffices (§4.2.1)."""
    lr: Rate = 0.02
    """η_θ of ascent."""
    stop: Literal["rounds", "converged"] = "rounds"
    max_loss: Rate | Literal["auto", "none"] = "auto"
    """A client stops ascending once its forget loss passes this. ``auto`` is 2 ln C, twice the loss of a
    guess: enough to forget, before the model is destroyed. ``none`` is the paper's literal T steps."""

    def loss_limit(self, num_classes: int) -> float:
        """Return ``max_loss`` as a number; infinite where nothing stops ascent."""
        if isinstance(self.max_loss, str):
            return 2 * math.log(num_classes) if self.max_loss == "auto" else math.inf
        return self.max_loss


@dataclass(frozen=True)
class Recover(Stage):
    """QuickDrop's descent on what remains; the baselines recover as they train, for rounds of their own."""

    rounds: NotNegative = 2
    """A short recovery on 2 % of the data is better than a long one."""
    stop: Literal["rounds", "converged", "loss"] = "rounds"
    """``converged`` as elsewhere, on the test set. ``loss`` needs no test data: ``rounds`` is the most, and recovery
    ends with the round in which the clients' loss, before their first step, has fallen by less than 5 %."""
    augment: bool = True
    """Add one real sample to each synthetic one (§3.3.1)."""


@dataclass(frozen=True)
class Relearn(Stage):
    """Descent on what was forgotten; the paper leaves its settings open."""

    rounds: NotNegative = 2
    stop: Literal["rounds", "converged"] = "rounds"
    data: Literal["forget", "mixed"] = "forget"
    """``forget`` is the paper's S_f alone (D_f for the baselines), which costs the other classes dearly unless the
    learning rate is tuned to the point; ``mixed`` adds the rest of S (of D)."""


@dataclass(frozen=True)
class Distillation:
    """The synthetic sets S_i: how large they are, and how they are made."""

    scale: Positive = 100
    """s: |S_i^c| = ceil(|D_i^c| / s)."""
    lr: Annotated[float, Ge(0)] = 0.1
    """η_S, learning rate of the pixels."""
    steps: Positive = 1
    """ς_S, pixel steps per local step."""
    batch: Positive = 256
    """|B^S|, synthetic images matched in a local step at most."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Of the pixels' SGD, as in Zhao et al.'s code, which the paper follows."""
    init: Literal["real", "noise"] = "real"
    """Start from randomly chosen real samples, or from Gaussian noise."""
    matching: bool = True
    """False leaves the synthetic samples in training as they began: an ablation."""
    finetune: NotNegative = 0
    """F, fresh networks on which the synthetic sets are refined after training."""
    gallery: NotNegative = 0
    """Images per class that leave their clients for the table ``images``, to be looked at; 0: none do. It changes
    nothing else, so it is no part of what a training is."""


@dataclass(frozen=True)
class Hyperparameters:
    """All that the methods' phases are built from, for a data set with so many classes."""

    train: Train
    unlearn: Unlearn
    recover: Recover
    relearn: Relearn
    synthetic: Distillation
    max_loss: float
    """A client's ascent stops once its forget loss passes this; ``inf`` never stops it."""
    model: "Model"
    """The network, for methods that act on some of its layers."""
    server: Server = MEAN
    """The server's rule where clients descend."""
    methods: Mapping[str, Any] = field(default_factory=dict)
    """The settings of each method that has any, by the method's name."""
