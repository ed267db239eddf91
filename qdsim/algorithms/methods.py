"""The methods: of each its name, its title, what it can be asked, its settings and the module that implements it.

This file needs no torch, because a job is checked before torch is loaded; a method's module is imported when its
phases are built. Such a module has

    phases(hyper, settings, request, history) -> list[Phase]

and, where the method stores anything for unlearning, ``storage_bytes(hyper, settings, request, history)``: what is
stored, and what its paper would have stored.

| paper      | module         | forgets           |
|------------|----------------|-------------------|
| QuickDrop  | quickdrop.py   | classes, clients  |
| Retrain-Or | retrain.py     | classes, clients  |
| SGA-Or     | sga.py         | classes, clients  |
| FedEraser  | federaser.py   | classes, clients  |
| FU-MP      | fump.py        | classes           |
| S2U        | s2u.py         | clients           |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from qdsim.ranges import NotNegative, Positive, Share

CAPABILITIES = ("class", "client", "relearn")
"""What a method may be asked: to forget a class, to forget a client, to take it back."""


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
    recover_rounds: NotNegative = 2
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


@dataclass(frozen=True)
class S2u:
    """S2U; its rounds have the settings of ``[train]``."""

    rounds: Positive = 10
    leaver: Annotated[float, Ge(0), Le(1)] = 0.1
    """β: factor on the leaving client's updates."""
    others: Annotated[float, Ge(1)] | Literal["auto"] = "auto"
    """γ: factor on the others' updates; ``auto`` keeps the total weight at 1."""
    recover_rounds: NotNegative = 0


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
