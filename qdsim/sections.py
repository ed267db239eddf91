"""The sections of a job: every key with its type, its range and its default, the paper's where the paper gives one."""

import os
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from qdsim.hyper import Numerics, Stage

MOST = 10**9
"""Counts beyond this are slips of the keyboard, and overflow what counts them."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
SMALLEST_FRACTION = 0.0001


class Section(BaseModel):
    """Unknown keys, other types and later changes are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class DataSection(Section):
    """Which images, and where they lie."""

    dataset: str = "digits"
    """``digits`` (needs no download), ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100``, ``svhn``,
    ``svhn+extra``, ``parquet:DIR`` (Hugging Face layout) or ``folder:DIR`` (``train/`` and ``test/``)."""
    root: str = Field(default_factory=lambda: os.environ.get("QDSIM_DATA_ROOT", "data"))
    """Where data sets lie; ``$QDSIM_DATA_ROOT``, else ``data``."""
    verify: bool = True
    """Check SVHN's files against torchvision's checksums."""
    download: bool = False
    """Fetch a missing data set from its public source."""
    size: Positive | None = None
    """Resize the images of ``parquet:`` and ``folder:`` to size x size pixels."""


class PartitionSection(Section):
    """How the training data are divided among the clients."""

    kind: Literal["dirichlet", "official", "iid"] = "dirichlet"
    """``dirichlet``: class-major Dir(α); ``official``: the same with the seeding of the paper's code."""
    clients: Positive = 10
    """N."""
    alpha: Rate = 0.1
    """α; smaller is more heterogeneous."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """One partition for all seeds; by default each run seed has its own (``official``: 42)."""
    min_size: Positive = 10
    """No client gets fewer samples: the split is drawn again, at most 1,000 times."""


class ModelSection(Section):
    """The ConvNet [W, N, A, P] x D."""

    width: Annotated[int, Field(ge=1, le=4096)] = 128
    """W."""
    depth: Annotated[int, Field(ge=1, le=16)] = 3
    """D."""


class StageSection(Section):
    """What every phase has."""

    rounds: NotNegative
    """Rounds of the phase; 0 leaves it out."""
    steps: Positive = 50
    """T."""
    batch_size: Positive = 256
    """|B|."""
    lr: Rate = 0.01
    """η_θ."""
    participation: Share = 1.0
    """Share of the clients with data for the phase that take part in a round."""
    stop: Literal["rounds", "converged"] = "rounds"
    """``converged``: ``rounds`` is the most, and the rule of ``qdsim/stopping.py`` ends the phase before."""

    def stage(self) -> Stage:
        """Return the plain values that the algorithms see."""
        return Stage(self.rounds, self.steps, self.batch_size, self.lr, self.participation, self.stop)


class TrainSection(StageSection):
    """FL training with in-situ distillation (Algorithm 2)."""

    rounds: Positive = 200
    """K."""


class UnlearnSection(StageSection):
    """Gradient ascent on the forget set (Algorithm 1)."""

    rounds: Positive = 1
    """One round suffices (§4.2.1)."""
    lr: Rate = 0.02
    """η_θ of ascent."""
    max_loss: Rate | Literal["auto", "none"] = "auto"
    """A client stops ascending once its forget loss passes this. ``auto`` is 2 ln C, twice the loss of a
    guess: enough to forget, before the model is destroyed. ``none`` is the paper's literal T steps."""


class RecoverSection(StageSection):
    """QuickDrop's descent on what remains; the baselines recover as they train, for rounds of their own."""

    rounds: NotNegative = 2
    """A short recovery on 2 % of the data is better than a long one."""
    stop: Literal["rounds", "converged", "loss"] = "rounds"  # type: ignore[assignment]  # one more than elsewhere
    """``converged`` as elsewhere, on the test set. ``loss`` needs no test data: ``rounds`` is the most, and recovery
    ends with the round in which the clients' loss, before their first step, has fallen by less than 5 %."""
    augment: bool = True
    """Add one real sample to each synthetic one (§3.3.1)."""


class RelearnSection(StageSection):
    """Descent on what was forgotten; the paper leaves its settings open."""

    rounds: NotNegative = 2
    data: Literal["forget", "mixed"] = "forget"
    """``forget`` is the paper's S_f alone (D_f for the baselines), which costs the other classes dearly unless the
    learning rate is tuned to the point; ``mixed`` adds the rest of S (of D)."""


class SyntheticSection(Section):
    """The synthetic sets."""

    scale: Positive = 100
    """s."""
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """η_S."""
    steps: Positive = 1
    """ς_S."""
    batch: Positive = 256
    """|B^S| at most."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Of the pixels' SGD, as in Zhao et al.'s code, which the paper follows."""
    init: Literal["real", "noise"] = "real"
    """Start from randomly chosen real samples, or from Gaussian noise."""
    matching: bool = True
    """False keeps the synthetic samples in training as they began."""
    finetune: NotNegative = 0
    """F."""
    gallery: NotNegative = 0
    """Images per class that leave their clients for the table ``images``, to be looked at; 0: none do."""


class SgaSection(Section):
    """SGA-Or; its ascent has the settings of ``[unlearn]``, its recovery those of ``[train]``."""

    unlearn_rounds: Positive = 2
    recover_rounds: NotNegative = 2
    mode: Literal["ascent", "reflect", "bounded"] = "ascent"
    """``reflect`` mirrors a descent on the forget set, ``bounded`` descends on -log(1 - p/2)."""


class FedEraserSection(Section):
    """FedEraser; calibration and recovery have the settings of ``[train]``."""

    interval: Positive = 2
    """Δt: every so many rounds of training are replayed."""
    calibration: Share = 0.5
    """r: share of training's local steps that a calibration takes."""
    norm: Literal["tensor", "model"] = "tensor"
    """The stored length is that of each tensor, or of the whole update."""
    first_round: Literal["auto", "stored", "calibrated"] = "auto"
    """``auto``: stored at client level, as in FedEraser's paper, calibrated at class level."""
    recover_rounds: NotNegative = 3


class FumpSection(Section):
    """FU-MP; its recovery has the settings of ``[train]``."""

    prune: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """R: share of all channels that are pruned."""
    side: Literal["top", "bottom"] = "top"
    """``bottom`` prunes the least discriminative channels, as the authors' code does."""
    hook: Literal["activation", "convolution"] = "activation"
    """Where a channel's activity is read: after normalisation and ReLU, or at the bare convolution."""
    recover_rounds: NotNegative = 4


class S2uSection(Section):
    """S2U; its rounds have the settings of ``[train]``."""

    rounds: Positive = 10
    leaver: Annotated[float, Field(ge=0, le=1)] = 0.1
    """β: factor on the leaving client's updates."""
    others: Annotated[float, Field(ge=1, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """γ: factor on the others' updates; ``auto`` keeps the total weight at 1."""
    recover_rounds: NotNegative = 0


class ClusterSection(Section):
    """Where the clients sit. Nothing here changes a result but ``threads``, ``micro_batch``, ``precision``,
    ``compile`` and ``winograd``."""

    gpus_per_client: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Fraction of a GPU that an actor is pinned to; ``auto`` shares what there is, 0 without GPUs."""
    clients_per_actor: Positive | Literal["auto"] = 1
    """``auto`` packs clients so that memory suffices, and no core has more than two actors, no GPU more than eight."""
    cpus_per_actor: Rate | Literal["auto"] = "auto"
    """CPUs that Ray sets aside for an actor; ``auto``: half of them shared out, so that ten actors fit two cores. How
    many steps run at once is decided by cores, whatever this says."""
    memory_per_actor_gb: Rate | Literal["auto"] = "auto"
    """Memory that Ray sets aside for an actor; ``auto``: an estimate from model and batch (see ``qdsim plan``)."""
    threads: Positive = 1
    """torch threads of each process."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Gradients are summed over pieces of this many samples; ``auto``: 32 on the CPU, where the cache is
    short, and the whole batch on a GPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What convolutions are computed in; ``bfloat16`` is for GPUs that are faster with it. Results change a little."""
    compile: bool = False
    """Compile a step's passes with ``torch.compile``: faster after a minute or two of warm-up, which later runs find in
    its cache. Needs a C++ compiler on CPUs. Results change in their last digits."""
    winograd: Literal["matching", "always", "never"] = "matching"
    """Where convolutions of 64 channels or more on a CPU are done with a quarter of the multiplications
    (``qdsim/winograd.py``), and the first block with fewer passes over memory (``qdsim/patches.py``). The rounding of
    the former is coarser: ``matching`` leaves the model's own gradients as they are, only synthetic pixels change in
    their last digits; ``always`` trains faster, too."""
    placement_timeout_s: Rate = 30.0
    """How long to wait for room before giving up with exit code 3."""
    attempts: Positive = 3
    """How often a step is tried when its actor is lost, and a run when its driver is; then it ends with code 4 or 1."""
    step_timeout_s: Rate | Literal["auto"] = "auto"
    """After how long a step is taken to hang and its actor replaced; ``auto``: 20 times the longest of its phase so
    far, 600 s at least; four hours for a phase's first step."""
    local_gpus: NotNegative | None = None
    """Logical GPUs of the local cluster that ``qdsim run`` starts; by default those that are found."""
    local_cpus: Positive | None = None
    """CPUs of that local cluster; by default those that are found."""

    def numerics(self) -> Numerics:
        """Return what moves bits."""
        return Numerics(self.threads, self.micro_batch, self.precision, self.compile, self.winograd)

    @field_validator("gpus_per_client")
    @classmethod
    def _ray_can_count_it(cls, fraction: float | str) -> float | str:
        if isinstance(fraction, float) and 0 < fraction < SMALLEST_FRACTION:
            raise ValueError(f"Ray counts GPUs in steps of {SMALLEST_FRACTION}")
        return fraction


class Request(Section):
    """What is to be forgotten."""

    kind: Literal["class", "client"]
    target: NotNegative | Literal["random"]
    """A number, or ``random``: drawn for each seed."""
