"""Hyper-parameters as the algorithms see them: plain frozen values, checked by ``config.py``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Numerics:
    """How a step is computed: all of it moves bits, so it is the same in every process."""

    threads: int = 1
    micro_batch: int | Literal["auto"] = "auto"
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    winograd: Literal["matching", "always", "never"] = "matching"


@dataclass(frozen=True)
class Stage:
    """One phase's federated SGD: how many rounds, and what a client does in each."""

    rounds: int
    """K for training; 1 to unlearn and 2 to recover in the paper."""
    steps: int
    """T, local steps of a client in a round."""
    batch_size: int
    """|B|; a client with fewer samples takes all of them."""
    lr: float
    """η_θ."""
    participation: float
    """Share of the clients with non-empty Z_i that are drawn in each round."""
    stop: str = "rounds"
    """``rounds``: after so many; ``converged``, by the phase's rule, and ``loss``, by the clients' own losses: after so
    many at most."""


@dataclass(frozen=True)
class Distillation:
    """How the synthetic sets S_i are made."""

    scale: int
    """s: |S_i^c| = ceil(|D_i^c| / s)."""
    lr: float
    """η_S, learning rate of the pixels."""
    steps: int
    """ς_S, pixel steps per local step."""
    batch: int
    """|B^S|, synthetic images matched in a local step at most."""
    momentum: float
    """Momentum of the pixels' SGD."""
    init: str
    """``real``: start from randomly chosen real samples; ``noise``: from Gaussian noise."""
    matching: bool
    """False leaves the synthetic samples in training as they began: an ablation."""
    finetune: int
    """F, fresh networks on which the synthetic sets are refined after training."""


@dataclass(frozen=True)
class Sga:
    """SGA-Or."""

    unlearn_rounds: int
    recover_rounds: int
    mode: str
    """``ascent``, ``reflect`` or ``bounded``."""


@dataclass(frozen=True)
class FedEraser:
    """FedEraser."""

    interval: int
    """Δt: every so many rounds of training are replayed."""
    calibration: float
    """r: share of the training's local steps in a calibration."""
    norm: str
    """``tensor`` or ``model``: what the stored length is the length of."""
    first_round: str
    """``stored``, ``calibrated``, or ``auto``: stored where it cannot hold anything of the forget set."""
    recover_rounds: int


@dataclass(frozen=True)
class Fump:
    """FU-MP."""

    prune: float
    """R: share of the channels that are removed."""
    side: str
    """``top`` removes the most discriminative channels, ``bottom`` the least."""
    hook: str
    """``activation`` or ``convolution``: where a channel's activity is read."""
    recover_rounds: int


@dataclass(frozen=True)
class S2u:
    """S2U."""

    rounds: int
    leaver: float
    """β: factor on the leaving client's update."""
    others: float | None
    """γ: factor on the others'; None keeps the total weight at 1."""
    recover_rounds: int


@dataclass(frozen=True)
class Hyper:
    """All that the methods' phases are built from."""

    train: Stage
    unlearn: Stage
    recover: Stage
    relearn: Stage
    synthetic: Distillation
    max_loss: float
    """A client's ascent stops once its forget loss passes this; ``inf`` never stops it."""
    augment: bool
    """Recovery adds one real sample to each synthetic one (§3.3.1)."""
    relearn_mixed: bool
    """Relearning takes all of S; False is the paper's S_f alone."""
    sga: Sga
    federaser: FedEraser
    fump: Fump
    s2u: S2u
