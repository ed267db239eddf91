"""Hyper-parameters as the algorithms see them: plain frozen values, checked by ``config.py``."""

from dataclasses import dataclass


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
