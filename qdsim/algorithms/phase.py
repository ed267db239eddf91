"""The vocabulary between algorithms and federation: what a round is told, does and returns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from qdsim import seeds
from qdsim.algorithms.server import MEAN, Server
from qdsim.algorithms.settings import Stage
from qdsim.algorithms.stopping import SETTLED, Rule
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import View
from qdsim.models.params import Params


@dataclass(frozen=True)
class RoundContext:
    """Which round of which phase: with a client's number it seeds every draw of a step."""

    run_seed: int
    request: str
    phase: str
    round_number: int

    def generator(self, purpose: str, client_id: int = -1) -> torch.Generator:
        """Return the generator for a purpose in this round."""
        return seeds.generator(
            self.run_seed,
            purpose,
            request=self.request,
            phase=self.phase,
            round_number=self.round_number,
            client_id=client_id,
        )


@dataclass
class ClientUpdate:
    """All that leaves a client after a step. Neither samples nor synthetic images are in it."""

    client_id: int
    num_samples: int
    """|Z_i|, the client's weight."""
    delta: Params
    """θ_i - θ; in FU-MP's pruning round the client's activation statistics; empty where there is nothing to send."""
    loss: float
    """Mean loss over the step's mini-batches."""
    gradients: int
    """Mini-batch gradients with respect to θ on the phase's own data (matching is not counted)."""
    samples: int
    """Samples that went into those gradients."""
    first_loss: float | None = None
    """Loss of the first of them: what the round's model was worth to the client, before it moved."""
    bytes_up: int = 0
    step_s: float = 0.0
    """Wall-clock time of the step where it ran."""
    saving_s: float = 0.0
    """Part of ``step_s``: the client's new state is written."""
    matching_s: float = 0.0
    compute_s: float = 0.0
    peak_memory_bytes: int = 0
    node_id: str = ""
    gpu_id: str = ""


ClientStep = Callable[..., tuple[ClientState, ClientUpdate]]
"""``client_step(client, params, ctx=..., compute=...)``: values in, values out."""

ServerStep = Callable[..., Params]
"""``server_step(params, updates, ctx)``; updates arrive in the order of client numbers."""

Select = Callable[[np.ndarray, RoundContext], list[int]]
"""``select(sizes, ctx)``: the participants of a round, in order, from the |Z_i|."""

Updates = Iterable[ClientUpdate]


@dataclass(frozen=True)
class Phase:
    """A number of rounds of ``client_step`` then ``server_step`` on one view of the data."""

    name: str
    """``train``, ``finetune``, ``unlearn``, ``recover`` or ``relearn``."""
    stage: Stage
    view: View
    select: Select
    client_step: ClientStep
    server_step: ServerStep
    server: Server = MEAN
    """What the server makes of the model that ``server_step`` returns; by default that is the new model."""
    start: Literal["current", "initial", "fresh"] = "current"
    """Begin from the current parameters, from training's θ_0, or from new random ones."""
    learns: bool = False
    """Its client step changes the client's own state: the synthetic set."""
    reads_once: bool = False
    """Its client step reads every sample once and forms no gradient, as FU-MP's statistics do; it is planned so."""
    rule: Rule | None = None
    """What ends the phase early where its stage is to stop by convergence; None: nothing does."""

    @property
    def ends_by(self) -> Rule | None:
        """The rule that its stage asks for; None: only its rounds end it."""
        if self.stage.stop == "loss":
            return SETTLED
        return self.rule if self.stage.stop == "converged" else None
