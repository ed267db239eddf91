"""A job: the TOML file, ``--profile`` and ``--set`` merged into one frozen, validated object.

Every default is the paper's value (§4.1) where the paper gives one. ``--set`` beats ``--profile`` beats
the job file. Whatever is wrong is refused here, or in :mod:`qdsim.experiment.plan` where the data are needed to
tell, before anything starts.
"""

import difflib
import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from qdsim.algorithms import methods as registry
from qdsim.algorithms import server
from qdsim.algorithms.methods import METHODS, Method
from qdsim.algorithms.server import Server
from qdsim.algorithms.settings import Distillation, Hyperparameters, Recover, Relearn, Train, Unlearn
from qdsim.data import datasets
from qdsim.errors import BadInput, as_toml
from qdsim.experiment import job_files
from qdsim.experiment.profiles import PROFILES
from qdsim.experiment.sections import (
    Checked,
    Cluster,
    DataSection,
    ModelSection,
    PartitionSection,
    Request,
    Section,
)
from qdsim.federation import attacks as attack_registry
from qdsim.models.kinds import CONVNET, NETWORKS, TORCHVISION
from qdsim.ranges import Seed
from qdsim.store.storage import StoragePath
from qdsim.store.tables import RENAMED_ATTACKS

if TYPE_CHECKING:  # a job is checked without torch
    from qdsim.models.model import Model

FIXED_SECTIONS = ("data", "cluster")
"""No sweep may change these: all cells of a run share one data set and one set of actors."""
MOST_POINTS = 1000
EXAMPLE_REQUESTS = '[{kind = "class", target = 9}]'
WANTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
    "string_pattern_mismatch": "made of letters, digits, dots, _ and -, the first a letter or a digit",
    "string_too_long": "of {max_length} letters at most",
}
"""What a value must be, by the name of pydantic's complaint."""
MEMBERS = ("int", "str")
"""Of the union that a request's target is, by pydantic's names."""
ABSENT = ("None", "none", "null", "nil")
"""Words of other languages for a value that is not there."""
Overrides = Mapping[str, Any] | Sequence[str]
"""Values by their keys, or texts ``KEY=VALUE``."""


class Job(Section):
    """One experiment: seeds x methods x requests.

    Beside these fields a job has a section of each method that has settings, under the method's name.
    """

    model_config = ConfigDict(extra="allow")  # the methods' sections, which a validator checks: it allows nothing else

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
    """Run directories begin with it."""
    about: str = ""
    """One line: what the job reproduces."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, strict=False)] = (0, 1, 2, 3, 4)
    """Each seed is a federation of its own; results are averaged over them."""
    methods: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("quickdrop", "retrain")
    """What serves the requests, each from the same trained model: methods of qdsim, or ``package.module:NAME``."""
    requests: Annotated[tuple[Request, ...], Field(min_length=1, strict=False)] = (Request(kind="class", target=9),)
    """What is to be forgotten: independent of each other, unless ``sequence`` is set."""
    sequence: bool = False
    """True: each request starts from the model that the one before it left."""
    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Keys with the values to try, for example ``{"synthetic.scale" = [10, 100]}``; all combinations run."""
    membership: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Membership inference on each unlearned model: ``loss_threshold``, or the paper's ``entropy_svm``, or both."""
    data: DataSection = DataSection()
    partition: PartitionSection = PartitionSection()
    model: ModelSection = ModelSection()
    train: Annotated[Train, Checked] = Train()
    unlearn: Annotated[Unlearn, Checked] = Unlearn()
    recover: Annotated[Recover, Checked] = Recover()
    relearn: Annotated[Relearn, Checked] = Relearn()
    synthetic: Annotated[Distillation, Checked] = Distillation()
    server: Annotated[Server, Checked] = Server()
    cluster: Annotated[Cluster, Checked] = Cluster()

    @model_validator(mode="before")
    @classmethod
    def _check_method_sections(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Check the sections of methods, and refuse every other key that is not a field."""
        named = values.get("methods", ())
        outside = [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []
        declared = method_sections(outside)
        for name in declared.keys() & cls.model_fields.keys():
            raise BadInput("methods", name, "a method from outside has the name of a section of every job")
        for key in values.keys() - cls.model_fields.keys() - declared.keys():
            raise _unknown_key(key, values[key], [*cls.model_fields, *declared])
        checked: dict[str, Any] = {}
        for name, settings in declared.items():
            try:
                checked[name] = Checked.adapter(settings).validate_python(values.get(name, {}))
            except ValidationError as error:
                raise _as_bad_input(error.errors(), within=name, declared=settings) from None
        return values | checked

    @field_validator("server")
    @classmethod
    def _known_rule(cls, settings: Server) -> Server:
        server.rule_of(settings.kind)
        return settings

    @field_validator("membership")
    @classmethod
    def _known_attacks(cls, attacks: tuple[str, ...]) -> tuple[str, ...]:
        for attack in attacks:
            if attack in RENAMED_ATTACKS:
                raise ValueError(f"{attack} is now {RENAMED_ATTACKS[attack]}")
            attack_registry.find(attack)
        return attacks

    @field_validator("methods", "seeds", "requests", "membership")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        fixed = [value for value in values if getattr(value, "target", None) != "random"]
        if len(set(fixed)) < len(fixed):
            raise ValueError("each entry may be listed once")
        return values

    @model_validator(mode="after")
    def _names(self) -> "Job":
        """Refuse two methods that would have one name in the tables."""
        if len(self.methods_by_name) < len(self.methods):
            raise BadInput("methods", list(self.methods), "two of these have the same name in the tables")
        return self

    @model_validator(mode="after")
    def _network(self) -> "Job":
        """Refuse settings of the ConvNet's passes where another network, or autograd, does the work."""
        if self.model.kind == CONVNET and self.model.gradients != "autograd":
            return self
        reason = "acts on the ConvNet's own passes, and autograd does the work here (model.kind, model.gradients)"
        if self.cluster.compile:
            raise BadInput("cluster.compile", True, f"{reason}; leave it false")
        if self.cluster.winograd == "always":
            raise BadInput("cluster.winograd", "always", f"{reason}; leave it at matching")
        return self

    @model_validator(mode="after")
    def _targets(self) -> "Job":
        clients = self.partition.clients
        for i, request in enumerate(self.requests):
            if request.kind != "client":
                continue
            if isinstance(request.target, str) and request.target != "random":
                why = "clients have no names: a client's target is a number, or random"
                raise BadInput(f"requests[{i}].target", request.target, why)
            if isinstance(request.target, int) and request.target >= clients:
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
            for name, method in self.methods_by_name.items():
                if not method.supports(request.kind):
                    fit = [m for m in METHODS if METHODS[m].supports(request.kind)]
                    why = (
                        f"{method.title} cannot forget a {request.kind}: {method.reasons[request.kind]}; "
                        f"leave {name} out of methods (those that can: {', '.join(fit)})"
                    )
                    raise BadInput(f"requests[{i}].kind", request.kind, why)
        return self

    def sweep_points(self) -> list[tuple[str, "Job"]]:
        """Return the points of the sweep, each with its label and its job; without a sweep the job itself."""
        if not self.sweep:
            return [("", self)]
        found = []
        for values in itertools.product(*self.sweep.values()):
            changed = self.model_dump() | {"sweep": {}}
            point = dict(zip(self.sweep, values, strict=True))
            for key, value in point.items():
                _assign(changed, key, value)
            try:
                job = validate(changed)
            except BadInput as error:
                if error.key not in point:
                    raise
                raise BadInput(f'sweep."{error.key}"', error.value, error.allowed) from None
            found.append((",".join(f"{k}={_in_label(v)}" for k, v in point.items()), job))
        return found

    @property
    def methods_by_name(self) -> dict[str, Method]:
        """The methods by the names that they have in the tables."""
        return {method.name: method for method in map(registry.find, self.methods)}

    def outside(self) -> list[tuple[str, str]]:
        """Return what the job names from outside qdsim: kinds of :data:`qdsim.plugins.GROUPS`, each with a name."""
        found = []
        for _, point in self.sweep_points():
            kind = point.model.kind
            own_network = kind in (CONVNET, *NETWORKS) or kind.startswith(TORCHVISION)
            found += [("method", name) for name in point.methods if name not in METHODS]
            found += [("attack", name) for name in point.membership if name not in attack_registry.ATTACKS]
            found += [] if own_network else [("network", kind)]
            found += [] if point.server.kind in server.RULES else [("server rule", point.server.kind)]
            found += [("data set", point.data.dataset)] if datasets.is_outside(point.data.dataset) else []
        return list(dict.fromkeys(found))

    def settings_of(self, method: str) -> Any:
        """Return a method's section; None where it has no settings of its own."""
        return (self.__pydantic_extra__ or {}).get(method)

    def hyperparameters(self, model: "Model") -> Hyperparameters:
        """Return what the algorithms see, with the network that they work on."""
        return Hyperparameters(
            train=self.train,
            unlearn=self.unlearn,
            recover=self.recover,
            relearn=self.relearn,
            synthetic=replace(self.synthetic, gallery=0),
            max_loss=self.unlearn.loss_limit(model.num_classes),
            model=model,
            server=self.server,
            methods={name: self.settings_of(name) for name in method_sections(self.methods)},
        )


def method_sections(named: Iterable[str] = ()) -> dict[str, type]:
    """Return the methods that have settings of their own, those of qdsim and those that a job names from outside.

    Each comes with the dataclass that declares its settings.
    """
    methods = [*METHODS.values(), *(registry.find(name) for name in named if name not in METHODS)]
    return {method.name: method.settings for method in methods if method.settings is not None}


def sections(named: Iterable[str] = ()) -> dict[str, type]:
    """Return every section of a job with the class that declares its keys; ``named`` are the job's methods."""
    own = {name: field.annotation for name, field in Job.model_fields.items()}
    found = {name: kind for name, kind in own.items() if isinstance(kind, type) and _declares_keys(kind)}
    return found | method_sections(named)


def _declares_keys(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Section)


def _keys_of(section: Any) -> list[str]:
    """Return the keys of a section."""
    return list(section.model_fields) if issubclass(section, Section) else [field.name for field in fields(section)]


def load(path: Path, *, profile: str | None = None, overrides: Overrides | None = None) -> Job:
    """Read a job file and apply a profile and overrides to it."""
    return build(_read(path), profile=profile, overrides=overrides)


def build(given: Mapping[str, Any], *, profile: str | None = None, overrides: Overrides | None = None) -> Job:
    """Apply a profile and overrides to the content of a job file, and check what comes of it."""
    values = dict(given)
    if isinstance(overrides, Mapping):
        chosen = [*overrides.items()]
    else:
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


def of_manifest(manifest: dict[str, Any], run_dir: StoragePath) -> Job:
    """Return the job that a run was started with."""
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise BadInput("RUN", str(run_dir), "its manifest.json holds no configuration")
    try:
        job = validate(in_todays_words(config))
        check_sweep(job)
    except BadInput as error:
        raise BadInput("RUN", str(run_dir), f"its manifest.json holds {error}") from None
    return job


def in_todays_words(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run, of whichever version, with the names that attacks have now."""
    attacks = config.get("membership")
    if not isinstance(attacks, list | tuple):
        return config
    return config | {"membership": [RENAMED_ATTACKS.get(a, a) if isinstance(a, str) else a for a in attacks]}


def check_sweep(job: Job) -> None:
    """Refuse a sweep over what the cells of a run share, or over values that are wrong."""
    allowed = {name: kind for name, kind in sections(job.methods).items() if name not in FIXED_SECTIONS}
    for key, values in job.sweep.items():
        section, _, name = key.partition(".")
        if section not in allowed or name not in _keys_of(allowed[section]):
            if section in allowed:
                raise _unknown_key(f'sweep."{key}"', values, _keys_of(allowed[section]))
            why = f"only keys of these sections can be swept: {', '.join(allowed)}"
            raise BadInput(f'sweep."{key}"', values, why)
        if not values:
            raise BadInput(f'sweep."{key}"', values, "list at least one value")
        if len({repr(value) for value in values}) < len(values):
            raise BadInput(f'sweep."{key}"', values, "each value may be listed once")
    points = math.prod(len(values) for values in job.sweep.values())
    if points > MOST_POINTS:
        raise BadInput("sweep", list(job.sweep), f"{points:,} combinations; {MOST_POINTS:,} at most")
    job.sweep_points()


def _in_label(value: Any) -> str:
    """Return a value as the name of a sweep's point has it, which tables keep."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def validate(values: dict[str, Any]) -> Job:
    """Return the Job, or refuse its first wrong key in one line."""
    try:
        return Job(**values)
    except ValidationError as error:
        raise _as_bad_input(error.errors()) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise job_files.missing(path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("JOB", str(path), f"cannot be read as UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:  # of numbers with thousands of digits, and brackets in brackets
        raise BadInput("JOB", str(path), f"is not TOML: {error}") from None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise BadInput("--set", text, "write KEY=VALUE, for example train.rounds=10")
    try:
        return key.strip(), tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), raw.strip()
    except (ValueError, RecursionError) as error:
        raise BadInput("--set", f"{key.strip()}=…", f"the value cannot be read: {error}") from None


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    if not all(key.split(".")):
        raise BadInput("--set", key, "a key is SECTION.KEY, for example train.rounds")
    *sections, last = key.split(".")
    if sections and sections[0] == "sweep":  # its keys have dots in them
        sections, last = ["sweep"], key.removeprefix("sweep.")
    for i, section in enumerate(sections):
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise BadInput(key, value, f"{'.'.join(sections[: i + 1])} is no section: it is {as_toml(inner)}")
        values[section] = values = dict(inner)
    values[last] = value


def _as_bad_input(problems: list[ErrorDetails], within: str = "", declared: type | None = None) -> BadInput:
    """Return pydantic's first complaint as ours; ``within`` is the section, ``declared`` so, checked by itself."""
    problem = problems[0]
    location = _location(problem, within)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if problem["type"] == "extra_forbidden":
        section = declared or (Request if location[0] == "requests" else sections()[str(location[0])])
        return _unknown_key(key, problem["input"], _keys_of(section))
    if problem["type"] == "missing":
        return BadInput(key, None, "is missing; a request is {kind = 'class', target = 9}, or with kind = 'client'")
    if problem["type"] == "value_error":  # of a check of ours
        return BadInput(key, problem["input"], problem["msg"].removeprefix("Value error, "))
    if location[0] == "sweep" and len(location) == 2 and problem["input"] and isinstance(problem["input"], dict):
        quoted = [f'sweep."{location[1]}.{name}" = {as_toml(v)}' for name, v in problem["input"].items()]
        return BadInput(key, problem["input"], f"a swept key stands in quotes, since it has a dot: {', '.join(quoted)}")
    # the union of a number and a word yields one complaint for each
    alike = [other for other in problems if _location(other, within) == location]
    if problem["input"] in ABSENT and not any(other["type"] == "literal_error" for other in alike):
        return BadInput(key, problem["input"], "TOML has no such value: leave the key out, and it has its default")
    wanted = list(dict.fromkeys(_wanted(other, location) for other in alike))
    return BadInput(key, problem["input"], f"must be {' or '.join(wanted)}")


def _location(problem: ErrorDetails, within: str) -> list[str | int]:
    """Return the keys that lead to what is wrong."""
    unknown, swept = problem["type"] == "extra_forbidden", problem["loc"][:1] == ("sweep",)
    found: list[str | int] = [within] if within else []
    for part in problem["loc"]:
        if swept and isinstance(part, str) and "." in part:
            found.append(f'"{part}"')
        # pydantic names the members of a union, too, for example "literal['auto']": no keys of ours
        elif unknown or isinstance(part, int) or (part.isidentifier() and part not in MEMBERS):
            found.append(part)
    return found


def _wanted(problem: ErrorDetails, location: list[str | int]) -> str:
    """Return what a value must be, in words of TOML."""
    kind = problem["type"]
    limits = {name: f"{v:g}" if isinstance(v, float) else v for name, v in problem.get("ctx", {}).items()}
    if kind in WANTED:
        return WANTED[kind].format(**limits)
    if kind.startswith(("int_", "float_")):
        return "a whole number" if kind.startswith("int_") else "a number"
    if kind in ("tuple_type", "list_type"):
        examples = {
            "seeds": "[0, 1]",
            "methods": '["quickdrop", "retrain"]',
            "requests": EXAMPLE_REQUESTS,
            "membership": '["loss_threshold"]',
        }
        return f"a list, for example {examples.get(str(location[0]), '[0.1, 0.2]')}"
    if kind in ("dict_type", "model_type", "model_attributes_type", "dataclass_type"):
        if location[0] == "requests":
            return f"a table, for example {EXAMPLE_REQUESTS[1:-1]}"
        return f"a section, [{location[0]}] with keys below it" if len(location) == 1 else "a table, {key = value}"
    return problem["msg"].replace("Input should be ", "")


def _unknown_key(key: str, value: object, known: list[str]) -> BadInput:
    close = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    if "." not in key and not close:
        of = [f"{name}.{key}" for name, kind in sections().items() if key in _keys_of(kind)]
        hint = f"did you mean {' or '.join(of)}? " if of else ""
    if isinstance(value, dict) and not close:
        hint = "the section of a method from outside stands only beside that method in methods; "
    return BadInput(key, value, f"unknown key; {hint}known here: {', '.join(known)}")
