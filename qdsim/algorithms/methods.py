"""The methods: of each its name, its title, what it can be asked, its settings and the module that implements it.

This file needs no torch, because a job is checked before torch is loaded; a method's module is imported when its
phases are built. Such a module has

    phases(hyper, settings, request, history) -> list[Phase]

and, where the method stores anything for unlearning, ``storage_bytes(hyper, settings, request, history)``: what is
stored, and what its paper would have stored; and, where it cannot serve every network, ``refuses(model)``: why not, or
None.

A method from outside is a :class:`Method` too, in whatever module: a job names it as ``package.module:NAME``, or by the
name of an entry point in the group ``qdsim.methods``. The declaration and ``phases`` may stand in one file, with
``module=__name__``.

| paper      | module         | forgets           |
|------------|----------------|-------------------|
| QuickDrop  | quickdrop.py   | classes, clients  |
| Retrain-Or | retrain.py     | classes, clients  |
| SGA-Or     | sga.py         | classes, clients  |
| FedEraser  | federaser.py   | classes, clients  |
| FU-MP      | fump.py        | classes           |
| S2U        | s2u.py         | clients           |
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from qdsim import plugins
from qdsim.errors import BadInput
from qdsim.ranges import NotNegative, Positive, Share

CAPABILITIES = ("class", "client", "relearn")
"""What a method may be asked: to forget a class, to forget a client, to take it back."""
WANTED = {
    "phases": "phases(hyper, settings, request, history)",
    "refuses": "refuses(model)",
    "storage_bytes": "storage_bytes(hyper, settings, request, history)",
}
"""The functions that a method's module may have, each with what it is called with."""


@dataclass(frozen=True)
class Method:
    """One method, as its paper describes it."""

    name: str
    """In jobs and tables; its settings stand under this key."""
    title: str
    """In its paper."""
    module: str
    settings: type | None = None
    """A frozen dataclass of its settings, with defaults; None where it has none of its own."""
    uses_synthetic: bool = False
    """It works on synthetic sets, so training distils them."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why not, for each of :data:`CAPABILITIES` that it lacks."""

    def supports(self, capability: str) -> bool:
        """Tell whether it has one of :data:`CAPABILITIES`."""
        return capability not in self.reasons

    def declared(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        can = {capability: self.supports(capability) for capability in CAPABILITIES}
        return {"title": self.title, **can, "reasons": dict(self.reasons)}

    def load(self) -> ModuleType:
        """Import the module that implements it."""
        return import_module(self.module)


@dataclass(frozen=True)
class Sga:
    """SGA-Or; its ascent has the settings of ``[unlearn]``, its recovery those of ``[train]``."""

    unlearn_rounds: Positive = 2
    """Rounds of ascent."""
    recover_rounds: NotNegative = 2
    """Rounds of recovery; 0 leaves it out."""
    mode: Literal["ascent", "reflect", "bounded"] = "ascent"
    """``reflect`` mirrors a descent on the forget set, ``bounded`` descends on -log(1 - p/2)."""


@dataclass(frozen=True)
class FedEraser:
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
    """Rounds of recovery after the calibration; 0 leaves it out."""


@dataclass(frozen=True)
class Fump:
    """FU-MP; its recovery has the settings of ``[train]``."""

    prune: Annotated[float, Gt(0), Lt(1)] = 0.3
    """R: share of all channels that are pruned."""
    side: Literal["top", "bottom"] = "top"
    """``top`` prunes the most discriminative channels; ``bottom`` the least, as the authors' code does."""
    hook: Literal["activation", "convolution"] = "activation"
    """Where a channel's activity is read: after normalisation and ReLU, or at the bare convolution."""
    recover_rounds: NotNegative = 4
    """Rounds of recovery of the pruned network; 0 leaves it out."""


@dataclass(frozen=True)
class S2u:
    """S2U; its rounds have the settings of ``[train]``."""

    rounds: Positive = 10
    """Rounds with scaled updates."""
    leaver: Annotated[float, Ge(0), Le(1)] = 0.1
    """β: factor on the leaving client's updates."""
    others: Annotated[float, Ge(1)] | Literal["auto"] = "auto"
    """γ: factor on the others' updates; ``auto`` keeps the total weight at 1."""
    recover_rounds: NotNegative = 0
    """Rounds of recovery without the client that leaves; 0 leaves it out."""


METHODS = {
    method.name: method
    for method in (
        Method("quickdrop", "QuickDrop", "qdsim.algorithms.quickdrop", uses_synthetic=True),
        Method("retrain", "Retrain-Or", "qdsim.algorithms.retrain"),
        Method("sga", "SGA-Or", "qdsim.algorithms.sga", Sga),
        Method("federaser", "FedEraser", "qdsim.algorithms.federaser", FedEraser),
        Method(
            "fump",
            "FU-MP",
            "qdsim.algorithms.fump",
            Fump,
            reasons={
                "client": "it prunes the channels that tell a class apart, and a client is no class",
                "relearn": "what it prunes stays pruned",
            },
        ),
        Method(
            "s2u",
            "S2U",
            "qdsim.algorithms.s2u",
            S2u,
            reasons={
                "class": "it scales the updates of the client that leaves, and a class belongs to no single client"
            },
        ),
    )
}


@cache
def find(name: str) -> Method:
    """Return a method by its name, or by where it stands outside this package; refuse what is none."""
    if name in METHODS:
        return METHODS[name]
    found = plugins.load_named("method", "methods", name, METHODS)
    if not isinstance(found, Method):
        raise BadInput("methods", name, f"is a {type(found).__name__}; wanted is a qdsim.algorithms.methods.Method")
    _check_declaration(name, found)
    return found


def _check_declaration(name: str, method: Method) -> None:
    """Refuse a declaration from outside that the rest could not work with."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", method.name):
        raise BadInput("methods", name, f"its name is {method.name!r}; allowed are small letters, digits and _")
    if method.name in METHODS:
        raise BadInput("methods", name, f"its name is {method.name!r}, which is a method of qdsim: choose another")
    unknown = [capability for capability in method.reasons if capability not in CAPABILITIES]
    if unknown:
        raise BadInput("methods", name, f"its reasons name {unknown[0]!r}; allowed: {', '.join(CAPABILITIES)}")
    if method.settings is not None:
        if not (isinstance(method.settings, type) and is_dataclass(method.settings)):
            raise BadInput("methods", name, "its settings are no dataclass")
        bare = [f.name for f in fields(method.settings) if f.default is MISSING]
        if bare:
            raise BadInput("methods", name, f"its setting {bare[0]} has no default, and a job need not name it")
    module = plugins.imported("methods", name, method.module)
    phases = getattr(module, "phases", None)
    if not callable(phases):
        raise BadInput("methods", name, f"{method.module} has no function {WANTED['phases']}")
    for function, wanted in WANTED.items():
        takes = getattr(module, function, None)
        why = plugins.misfit(takes, *[None] * (wanted.count(",") + 1)) if takes is not None else None
        if why:
            raise BadInput("methods", name, f"{method.module}.{function}: {why}; wanted is {wanted}")
