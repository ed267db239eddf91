"""What the server makes of a round's mean: takes it as it is, or as the gradient of an optimiser of its own.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. Adaptive federated optimization. ICLR 2021 (Algorithm 2:
FedAdam, FedYogi). Hsu, Qi, Brown. Measuring the effects of non-identical data distribution for federated visual
classification. 2019 (FedAvgM: momentum at the server).

A rule is a function ``rule(params, delta, state, settings) -> (step, state)``: from the round's model θ, the mean of
the clients' updates Δ and what it remembers, to the step that the server takes and what it remembers next. All of them
are float64; the state begins empty in each phase, is part of every commit, and is read again where a run resumes.

A rule acts wherever clients descend by FedAvg: in training, retraining, recovery and relearning. It leaves ascent
alone, which an adaptive step would turn into something else, and the methods that have a server step of their own
(FedEraser's replay, S2U's scaling, FU-MP's pruning).

Departures from the papers: none known. Reddi et al. weigh clients alike in their experiments; here they have the
weights of FedAvg. v begins at τ², their v_{-1}.
This file needs no torch of its own: a job is checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Lt

from qdsim import plugins
from qdsim.errors import BadInput
from qdsim.ranges import Rate

if TYPE_CHECKING:
    from torch import Tensor

    from qdsim.models.params import Params


@dataclass(frozen=True)
class Server:
    """The server's rule, and its settings."""

    kind: str = "mean"
    """``mean`` (FedAvg), ``momentum`` (FedAvgM), ``adam`` (FedAdam), ``yogi`` (FedYogi), or ``package.module:rule``."""
    lr: Rate | Literal["auto"] = "auto"
    """η of the server; ``auto``: 1, which is FedAvg's, for ``mean`` and ``momentum``, 0.01 for the adaptive ones."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """β of ``momentum``, β₁ of ``adam`` and ``yogi``."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """β₂ of ``adam`` and ``yogi``."""
    tau: Rate = 1e-3
    """τ of ``adam`` and ``yogi``: the smaller, the more adaptive."""

    @property
    def rate(self) -> float:
        """η as a number."""
        if isinstance(self.lr, str):
            return 0.01 if self.kind in ("adam", "yogi") else 1.0
        return self.lr


MEAN = Server()
"""FedAvg."""
Rule = Callable[["Params", "Params", "Params", Server], "tuple[Params, Params]"]


def mean(params: Params, delta: Params, state: Params, settings: Server) -> tuple[Params, Params]:
    """FedAvg, with a step of η Δ."""
    return {name: settings.rate * tensor for name, tensor in delta.items()}, {}


def momentum(params: Params, delta: Params, state: Params, settings: Server) -> tuple[Params, Params]:
    """FedAvgM: m ← β m + Δ, and a step of η m."""
    m = {n: settings.momentum * state[f"m/{n}"] + d if state else d for n, d in delta.items()}
    return {n: settings.rate * t for n, t in m.items()}, {f"m/{n}": t for n, t in m.items()}


def adam(params: Params, delta: Params, state: Params, settings: Server) -> tuple[Params, Params]:
    """FedAdam: m ← β₁ m + (1 - β₁) Δ, v ← β₂ v + (1 - β₂) Δ², and a step of η m / (√v + τ)."""
    b2 = settings.beta2
    v = {n: b2 * _second(state, n, d, settings) + (1 - b2) * d * d for n, d in delta.items()}
    return _adaptive(delta, state, v, settings)


def yogi(params: Params, delta: Params, state: Params, settings: Server) -> tuple[Params, Params]:
    """FedYogi: as FedAdam, with v ← v - (1 - β₂) Δ² sign(v - Δ²)."""
    v = {}
    for n, d in delta.items():
        before, square = _second(state, n, d, settings), d * d
        v[n] = before - (1 - settings.beta2) * square * (before - square).sign()
    return _adaptive(delta, state, v, settings)


def _second(state: Params, name: str, delta: Tensor, settings: Server) -> Tensor:
    return state[f"v/{name}"] if state else delta * 0 + settings.tau**2


def _adaptive(delta: Params, state: Params, v: Params, settings: Server) -> tuple[Params, Params]:
    b1 = settings.momentum
    m = {n: (b1 * state[f"m/{n}"] if state else 0.0) + (1 - b1) * d for n, d in delta.items()}
    step = {n: settings.rate * m[n] / (v[n].sqrt() + settings.tau) for n in delta}
    return step, {f"m/{n}": t for n, t in m.items()} | {f"v/{n}": t for n, t in v.items()}


RULES: dict[str, Rule] = {"mean": mean, "momentum": momentum, "adam": adam, "yogi": yogi}


@cache
def rule_of(kind: str) -> Rule:
    """Return a rule by its name, or by where it stands: ``package.module:rule``; refuse what is none."""
    if kind in RULES:
        return RULES[kind]
    found = plugins.load_named("server rule", "server.kind", kind, RULES)
    if not callable(found):
        raise BadInput("server.kind", kind, f"is no function but a {type(found).__name__}")
    why = plugins.misfit(found, None, None, None, None)
    if why:
        raise BadInput("server.kind", kind, f"{why}; wanted is rule(params, delta, state, settings)")
    return found


def check_rule(settings: Server, params: Params) -> None:
    """Call a rule from outside twice, as two rounds would, so that what it returns is seen before anything runs.

    ``params`` are those of the network; each mean is 0.01 away from them, a number that a rule may divide by.
    """
    if settings.kind in RULES:
        return
    before = {name: tensor.double() for name, tensor in params.items()}
    state: Params = {}
    for _ in range(2):
        moved, state = _ruled(settings, before, {name: tensor * 0 + 0.01 for name, tensor in before.items()}, state)
        odd = [name for name, tensor in moved.items() if not bool(tensor.isfinite().all())]
        if odd:
            raise BadInput("server.kind", settings.kind, f"for updates of 0.01 its step of {odd[0]} is not finite")


def _ruled(settings: Server, params: Params, delta: Params, state: Params) -> tuple[Params, Params]:
    """Return what a rule makes of a round; refuse what is no step of this network and no state that can be kept."""
    rule = rule_of(settings.kind)
    if settings.kind in RULES:
        return rule(params, delta, state, settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}
    with plugins.calling("server.kind", settings.kind, "its rule"):
        returned = rule(params, delta, state, settings)
    why = _nonsense(returned, shapes)
    if why:
        raise BadInput("server.kind", settings.kind, f"{why}; wanted are the step and the state, two dicts of tensors")
    return returned


def _nonsense(returned: Any, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Say what is wrong with what a rule has returned, if anything is."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return f"its rule returned {type(returned).__name__}"
    for what, found in zip(("step", "state"), returned, strict=True):
        if not isinstance(found, dict):
            return f"its {what} is a {type(found).__name__}"
        odd = [name for name, tensor in found.items() if not (isinstance(name, str) and hasattr(tensor, "isfinite"))]
        if odd:
            return f"its {what} holds a {type(found[odd[0]]).__name__} under {odd[0]!r}"
    step = {name: tuple(tensor.shape) for name, tensor in returned[0].items()}
    odd = [name for name in shapes | step if shapes.get(name) != step.get(name)]
    if odd:
        here, there = step.get(odd[0], "not there"), shapes.get(odd[0], "unknown")
        return f"its step of {odd[0]} is {here}, in the model {there}"
    return None


def step(settings: Server, params: Params, mean_of: Params, state: Params) -> tuple[Params, Params]:
    """Return the new model and the new state, from the round's model θ and the weighted mean that FedAvg would take.

    With FedAvg's own settings that mean is the new model, bit for bit.
    """
    if settings.kind == MEAN.kind and settings.rate == MEAN.rate:
        return mean_of, {}
    before = {name: tensor.double() for name, tensor in params.items()}
    delta = {name: mean_of[name].double() - tensor for name, tensor in before.items()}
    moved, state = _ruled(settings, params, delta, state)
    return {n: (before[n] + moved[n]).to(t.dtype) for n, t in params.items()}, state
