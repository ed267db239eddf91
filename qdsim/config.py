"""A job: the TOML file, ``--profile`` and ``--set`` merged into one frozen, validated object.

Every default is the paper's value (§4.1) where the paper gives one. ``--set`` beats ``--profile`` beats
the job file. Whatever is wrong is refused here, or in :mod:`qdsim.plan` where the data are needed to
tell, before anything starts.
"""

import difflib
import math
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from qdsim.algorithms import METHODS
from qdsim.errors import BadInput
from qdsim.hyper import Distillation, Hyper, Stage
from qdsim.profiles import PROFILES

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
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

    width: Positive = 128
    """W."""
    depth: Positive = 3
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

    def stage(self) -> Stage:
        """Return the plain values that the algorithms see."""
        return Stage(self.rounds, self.steps, self.batch_size, self.lr, self.participation)


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
    """Descent on what remains."""

    rounds: NotNegative = 2
    """A short recovery on 2 % of the data is better than a long one."""
    augment: bool = True
    """Add one real sample to each synthetic one (§3.3.1)."""


class RelearnSection(StageSection):
    """Descent on what was forgotten; the paper leaves its settings open."""

    rounds: NotNegative = 2
    data: Literal["forget", "mixed"] = "forget"
    """``forget`` is the paper's S_f alone, which costs the other classes dearly unless the learning rate is
    tuned to the point; ``mixed`` adds the rest of S."""


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


class ClusterSection(Section):
    """Where the clients sit. Nothing here changes a result but ``threads`` and ``micro_batch``."""

    gpus_per_client: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Fraction of a GPU that an actor is pinned to; ``auto`` shares what there is, 0 without GPUs."""
    clients_per_actor: Positive | Literal["auto"] = 1
    """``auto`` packs clients where memory or GPUs do not suffice for an actor each."""
    threads: Positive = 1
    """torch threads of each process."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Gradients are summed over pieces of this many samples; ``auto``: 32 on the CPU, where the cache is
    short, and the whole batch on a GPU."""
    placement_timeout_s: Rate = 30.0
    """How long to wait for room before giving up with exit code 3."""
    local_gpus: NotNegative | None = None
    """Logical GPUs of the local cluster that ``qdsim run`` starts; by default those that are found."""
    local_cpus: Positive | None = None
    """CPUs of that local cluster; by default those that are found."""

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


class Job(Section):
    """One experiment: seeds x methods x requests."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
    about: str = ""
    """One line: what the job reproduces."""
    seeds: Annotated[tuple[NotNegative, ...], Field(min_length=1, strict=False)] = (0, 1, 2, 3, 4)
    """Each seed is a federation of its own; results are averaged over them."""
    methods: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("quickdrop", "retrain")
    """What serves the requests, each from the same trained model."""
    requests: Annotated[tuple[Request, ...], Field(min_length=1, strict=False)] = (Request(kind="class", target=9),)
    """What is to be forgotten: independent of each other, unless ``sequence`` is set."""
    sequence: bool = False
    """True: each request starts from the model that the one before it left."""
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    unlearn: UnlearnSection = UnlearnSection()
    recover: RecoverSection = RecoverSection()
    relearn: RelearnSection = RelearnSection()
    synthetic: SyntheticSection = SyntheticSection()
    cluster: ClusterSection = ClusterSection()

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        for method in methods:
            if method not in METHODS:
                raise ValueError(f"{method!r} is not a method; allowed: {', '.join(METHODS)}")
        return methods

    @field_validator("methods", "seeds", "requests")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        fixed = [value for value in values if getattr(value, "target", None) != "random"]
        if len(set(fixed)) < len(fixed):
            raise ValueError("each entry may be listed once")
        return values

    @model_validator(mode="after")
    def _targets(self) -> "Job":
        clients = self.partition.clients
        for i, request in enumerate(self.requests):
            if request.kind != "client":
                continue
            if request.target != "random" and request.target >= clients:
                last = clients - 1
                raise BadInput(f"requests[{i}].target", request.target, f"clients are numbered 0 to {last}")
            if clients == 1:
                raise BadInput("partition.clients", 1, "forgetting the only client leaves no data")
        return self

    def hyper(self, num_classes: int) -> Hyper:
        """Return the plain values that the algorithms see."""
        max_loss = self.unlearn.max_loss
        synthetic = self.synthetic.model_dump()
        return Hyper(
            train=self.train.stage(),
            unlearn=self.unlearn.stage(),
            recover=self.recover.stage(),
            relearn=self.relearn.stage(),
            synthetic=Distillation(**synthetic),
            max_loss={"auto": 2 * math.log(num_classes), "none": math.inf}.get(max_loss, max_loss),  # type: ignore[arg-type]
            augment=self.recover.augment,
            relearn_mixed=self.relearn.data == "mixed",
        )


def load(path: Path, *, profile: str | None = None, overrides: list[str] | None = None) -> Job:
    """Read a job file and apply a profile and ``KEY=VALUE`` overrides to it."""
    values = _read(path)
    chosen = [_parse_override(text) for text in overrides or []]
    for key, value in chosen:
        _assign(values, key, value)
    if profile is not None:
        if profile not in PROFILES:
            raise BadInput("--profile", profile, f"allowed: {', '.join(PROFILES)}")
        for key, value in PROFILES[profile](validate(values)).items():
            _assign(values, key, value)
        for key, value in chosen:  # --set beats --profile
            _assign(values, key, value)
    return validate(values)


def validate(values: dict[str, Any]) -> Job:
    """Return the Job, or refuse its first wrong key in one line."""
    try:
        return Job(**values)
    except ValidationError as error:
        problems = error.errors()
        # the union of a number and a word yields one entry per member: the first says enough
        raise _as_bad_input(problems[0]) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(str(p) for p in path.parent.glob("*.toml"))) or "no job file there"
        raise BadInput("JOB", str(path), f"no such file; found: {there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("JOB", str(path), f"cannot be read as UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput("JOB", str(path), f"is not TOML: {error}") from None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise BadInput("--set", text, "write KEY=VALUE, for example train.rounds=10")
    try:
        return key.strip(), tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), raw.strip()


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise BadInput("--set", key, f"{section} is not a section")
        values[section] = values = dict(inner)
    values[last] = value


def _as_bad_input(problem: ErrorDetails) -> BadInput:
    unknown = problem["type"] == "extra_forbidden"
    # pydantic names the members of a union in the location, for example "literal['auto']": no keys of ours
    location = [p for p in problem["loc"] if unknown or isinstance(p, int) or p.isidentifier()]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if unknown:
        section: Any = Job
        for part in location[:-1]:
            if not isinstance(part, int):
                section = section.model_fields[part].annotation
        section = Request if location[0] == "requests" else section
        known = list(section.model_fields)
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return BadInput(key, problem["input"], f"unknown key; {hint}known here: {', '.join(known)}")
    message = problem["msg"].removeprefix("Value error, ")
    return BadInput(key, problem["input"], message.replace("Input should", "input should", 1))
