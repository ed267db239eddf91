"""A job: the TOML file, ``--profile`` and ``--set`` merged into one frozen, validated object.

Every default is the paper's value (§4.1) where the paper gives one. ``--set`` beats ``--profile`` beats
the job file. Whatever is wrong is refused here, or in :mod:`qdsim.plan` where the data are needed to
tell, before anything starts.
"""

import difflib
import itertools
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from qdsim.errors import BadInput
from qdsim.hyper import Distillation, FedEraser, Fump, Hyper, S2u, Sga
from qdsim.methods import DECLARED
from qdsim.profiles import PROFILES
from qdsim.sections import (
    ClusterSection,
    DataSection,
    FedEraserSection,
    FumpSection,
    ModelSection,
    PartitionSection,
    RecoverSection,
    RelearnSection,
    Request,
    S2uSection,
    Section,
    Seed,
    SgaSection,
    SyntheticSection,
    TrainSection,
    UnlearnSection,
)
from qdsim.storage import Folder

FIXED_SECTIONS = ("data", "cluster")
"""No sweep may change these: all cells of a run share one data set and one set of actors."""
MOST_CELLS = 1000


class Job(Section):
    """One experiment: seeds x methods x requests."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
    about: str = ""
    """One line: what the job reproduces."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, strict=False)] = (0, 1, 2, 3, 4)
    """Each seed is a federation of its own; results are averaged over them."""
    methods: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("quickdrop", "retrain")
    """What serves the requests, each from the same trained model."""
    requests: Annotated[tuple[Request, ...], Field(min_length=1, strict=False)] = (Request(kind="class", target=9),)
    """What is to be forgotten: independent of each other, unless ``sequence`` is set."""
    sequence: bool = False
    """True: each request starts from the model that the one before it left."""
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Keys with the values to try, for example ``{"synthetic.scale" = [10, 100]}``; all combinations run."""
    membership: Annotated[tuple[Literal["balanced", "literal"], ...], Field(strict=False)] = ()
    """Membership inference on each unlearned model: ``balanced`` and label-aware, or the paper's ``literal`` one."""
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    unlearn: UnlearnSection = UnlearnSection()
    recover: RecoverSection = RecoverSection()
    relearn: RelearnSection = RelearnSection()
    synthetic: SyntheticSection = SyntheticSection()
    sga: SgaSection = SgaSection()
    federaser: FedEraserSection = FedEraserSection()
    fump: FumpSection = FumpSection()
    s2u: S2uSection = S2uSection()
    cluster: ClusterSection = ClusterSection()

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        for method in methods:
            if method not in DECLARED:
                raise ValueError(f"{method!r} is not a method; allowed: {', '.join(DECLARED)}")
        return methods

    @field_validator("methods", "seeds", "requests", "membership")
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

    @model_validator(mode="after")
    def _oracle(self) -> "Job":
        if self.membership and "retrain" not in self.methods:
            why = "an attack means something only beside the retrained model: add retrain to methods"
            raise BadInput("membership", list(self.membership), why)
        return self

    @model_validator(mode="after")
    def _pairs(self) -> "Job":
        """Refuse a method that cannot serve one of the requests."""
        for i, request in enumerate(self.requests):
            for name in self.methods:
                method = DECLARED[name]
                if not method.supports(request.kind):
                    fit = [m for m in DECLARED if DECLARED[m].supports(request.kind)]
                    why = (
                        f"{method.title} cannot forget a {request.kind}: {method.reasons[request.kind]}; "
                        f"leave {name} out of methods (those that can: {', '.join(fit)})"
                    )
                    raise BadInput(f"requests[{i}].kind", request.kind, why)
        return self

    def cells(self) -> list[tuple[str, "Job"]]:
        """Return the points of the sweep, each with its label and its job; without a sweep the job itself."""
        if not self.sweep:
            return [("", self)]
        found = []
        for values in itertools.product(*self.sweep.values()):
            changed = self.model_dump() | {"sweep": {}}
            point = dict(zip(self.sweep, values, strict=True))
            for key, value in point.items():
                _assign(changed, key, value)
            found.append((",".join(f"{k}={_as_toml(v)}" for k, v in point.items()), validate(changed)))
        return found

    def hyper(self, num_classes: int) -> Hyper:
        """Return the plain values that the algorithms see."""
        max_loss = self.unlearn.max_loss
        synthetic = self.synthetic.model_dump(exclude={"gallery"})
        return Hyper(
            train=self.train.stage(),
            unlearn=self.unlearn.stage(),
            recover=self.recover.stage(),
            relearn=self.relearn.stage(),
            synthetic=Distillation(**synthetic),
            max_loss={"auto": 2 * math.log(num_classes), "none": math.inf}.get(max_loss, max_loss),  # type: ignore[arg-type]
            augment=self.recover.augment,
            relearn_mixed=self.relearn.data == "mixed",
            sga=Sga(**self.sga.model_dump()),
            federaser=FedEraser(**self.federaser.model_dump()),
            fump=Fump(**self.fump.model_dump()),
            s2u=S2u(**(self.s2u.model_dump() | {"others": None if self.s2u.others == "auto" else self.s2u.others})),
        )


def load(path: Path, *, profile: str | None = None, overrides: list[str] | None = None) -> Job:
    """Read a job file and apply a profile and ``KEY=VALUE`` overrides to it."""
    values = _read(path)
    chosen = [_parse_override(text) for text in overrides or []]
    for key, value in chosen:
        _assign(values, key, value)
    if isinstance(values.get("sweep"), dict):  # one value by --set beats the file's list of them
        fixed = {key for key, _ in chosen}
        swept = {k: v for k, v in values["sweep"].items() if k not in fixed or {"sweep", f"sweep.{k}"} & fixed}
        values["sweep"] = swept
    if profile is not None:
        if profile not in PROFILES:
            raise BadInput("--profile", profile, f"allowed: {', '.join(PROFILES)}")
        for key, value in PROFILES[profile](validate(values)).items():
            _assign(values, key, value)
        for key, value in chosen:  # --set beats --profile
            _assign(values, key, value)
    job = validate(values)
    check_sweep(job)
    return job


def of_manifest(manifest: dict[str, Any], run_dir: Folder) -> Job:
    """Return the job that a run was started with."""
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise BadInput("RUN", str(run_dir), "its manifest.json holds no configuration")
    try:
        job = validate(config)
        check_sweep(job)
    except BadInput as error:
        raise BadInput("RUN", str(run_dir), f"its manifest.json holds {error}") from None
    return job


def check_sweep(job: Job) -> None:
    """Refuse a sweep over what the cells of a run share, or over values that are wrong."""
    for key, values in job.sweep.items():
        section, _, field = key.partition(".")
        swept = getattr(Job.model_fields.get(section), "annotation", None)
        allowed = [name for name, f in Job.model_fields.items() if _is_section(f.annotation)]
        allowed = [name for name in allowed if name not in FIXED_SECTIONS]
        if section not in allowed or not field or field not in getattr(swept, "model_fields", {}):
            raise BadInput("sweep", key, f"only fields of these sections can be swept: {', '.join(allowed)}")
        if not values:
            raise BadInput("sweep", key, "list at least one value")
        if len({repr(value) for value in values}) < len(values):
            raise BadInput("sweep", key, "each value may be listed once")
    points = math.prod(len(values) for values in job.sweep.values())
    if points > MOST_CELLS:
        raise BadInput("sweep", list(job.sweep), f"{points:,} combinations; {MOST_CELLS:,} at most")
    job.cells()


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    if sections and sections[0] == "sweep":  # its keys have dots in them
        sections, last = ["sweep"], key.removeprefix("sweep.")
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
