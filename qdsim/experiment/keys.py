"""The keys of a job as people look them up: type and range, default, meaning, all from where each is declared."""

import ast
import difflib
import inspect
import textwrap
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qdsim import plugins
from qdsim.algorithms import methods
from qdsim.errors import BadInput, as_toml
from qdsim.experiment.config import Job, sections
from qdsim.experiment.sections import Request
from qdsim.ranges import LARGEST_COUNT

WORDS = {int: "whole number", float: "number", bool: "true or false", str: "string", dict: "table"}
SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
REQUIRED = "required"
NO_DEFAULT = "-"


@dataclass(frozen=True)
class Key:
    """One key of a job."""

    name: str
    """``train.rounds``."""
    kind: str
    """Type and range."""
    default: str
    """As TOML; ``-`` where the key is left out by default."""
    meaning: str


def keys_of(section: str | None = None) -> list[Key]:
    """Return the keys of a section, of a method from outside (``package.module:NAME``), or all; or a single key.

    Nothing of a method that has no settings.
    """
    if section is not None and plugins.is_reference(section):
        found = methods.find(section)
        return [] if found.settings is None else _declared(found.settings, f"{found.name}.")
    if section in methods.METHODS and methods.METHODS[section].settings is None:
        return []
    every = [*_of_job(), *_declared(Request, "requests[0].")]
    for name, kind in sections().items():
        every += _declared(kind, f"{name}.")
    wanted = [key for key in every if section is None or key.name == section or _section(key) == section]
    if not wanted:
        known = [*dict.fromkeys(_section(key) for key in every)]
        close = difflib.get_close_matches(str(section), [*known, *(key.name for key in every)], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        allowed = ", ".join([*known, "a method's package.module:NAME"])
        raise BadInput("SECTION", section, f"no section or key of a job; {hint}there are {allowed}")
    return wanted


def _section(key: Key) -> str:
    return key.name.partition(".")[0].partition("[")[0]


def _of_job() -> list[Key]:
    return [key for key in _declared(Job, "") if key.name not in sections()]


def _declared(kind: type, prefix: str) -> list[Key]:
    """Return the keys that a class declares."""
    if issubclass(kind, BaseModel):
        return [
            Key(
                prefix + name, _kind(field.annotation, field.metadata), _default(field), _plain(field.description or "")
            )
            for name, field in kind.model_fields.items()
        ]
    assert is_dataclass(kind)
    hints, meanings = get_type_hints(kind, include_extras=True), attribute_docstrings(kind)
    return [
        Key(
            prefix + field.name,
            _kind(hints[field.name]),
            REQUIRED if field.default is MISSING else _shown(field.default),
            _plain(meanings.get(field.name, "")),
        )
        for field in fields(kind)
    ]


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings after the fields of a class; one that is declared again without keeps its base's."""
    found: dict[str, str] = {}
    for base in reversed([each for each in kind.__mro__ if is_dataclass(each)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = str(after.value.value)
    return found


def _kind(annotation: Any, metadata: Any = ()) -> str:
    """Return a type and its range in words of TOML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], arguments[1:])
    if origin is Literal:
        return " or ".join(as_toml(word) for word in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(member) for member in arguments if member is not NoneType)
    if origin in (tuple, list):
        return f"list of {_kind(arguments[0])}" if arguments[0] is not Any else "list"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table of {', '.join(annotation.model_fields)}"
    return f"{WORDS.get(annotation, 'value')}{_range(metadata)}"


def _range(metadata: Any) -> str:
    limits = [limit for entry in metadata for limit in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    said = []
    for limit in limits:
        for kind, name, sign in SIGNS:
            bound = getattr(limit, name) if isinstance(limit, kind) else None
            if bound is not None and bound < LARGEST_COUNT:
                said.append(f"{sign} {bound:g}")
    return f" {', '.join(said)}" if said else ""


def _default(field: FieldInfo) -> str:
    return REQUIRED if field.is_required() else _shown(field.get_default(call_default_factory=True))


def _shown(value: Any) -> str:
    if value is None:
        return NO_DEFAULT
    if isinstance(value, tuple):
        return as_toml([entry.model_dump() if isinstance(entry, BaseModel) else entry for entry in value])
    return as_toml(value)


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "").split())
