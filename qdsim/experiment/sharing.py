"""What a run computes once though several cells of a sweep ask for it: a training, and what a baseline does from there.

A baseline's result is a function of the model that training has left, of what the server remembers of it where the
method looks at that, and of the phases that the method has built of the settings: each has its stage, its view of the
data and its steps. Where two cells agree in all of that, down to the last bit, the second takes the rows and the model
of the first. What works on synthetic sets is never shared, and neither is a step that holds anything but plain values,
nor a method from outside, whose steps might look at anything that a client has: when in doubt, it runs.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from qdsim import __version__
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
from qdsim.algorithms.phase import Phase
from qdsim.experiment.plan import Plan, Task
from qdsim.experiment.trained import VERSION, description
from qdsim.models import params as P
from qdsim.models.params import Params

NOT_THERE_YET = "planned"
"""The device of a run that has not begun."""


class _Unknown(Exception):
    """A step holds something of which nobody can tell whether it is the same."""


def key_of(plan: Plan, task: Task, phases: list[Phase], start: Params, storage: tuple[int, int], device: str) -> str:
    """Return the name of a task's result, the same where all that it depends on is; empty where it is not shared."""
    if len(plan.points) == 1:  # nobody to share with
        return ""
    return _key(plan, task, phases, P.sha256(start), storage, device)


def computed(plan: Plan) -> Iterator[tuple[Task, Phase]]:
    """Yield the phases that a run of this plan computes, nothing found from before: what cells share comes once."""
    trained, served = set(), set()
    for training, tasks in plan.trainings():
        point = training.point
        phases = training.phases()
        described = [description(plan, training, phases[: n + 1], NOT_THERE_YET) for n in range(len(phases))]
        for phase, state in zip(phases, map(_text, described), strict=True):
            if state not in trained:
                trained.add(state)
                yield training, phase
        # matching leaves θ alone: whatever the synthetic settings, the same model comes out
        model = _text({**described[-1], "synthetic": point.distils and point.hyper.synthetic.matching})
        reached: dict[str, str] = {}
        for task in tasks:
            start = reached.get(task.method, model) if point.job.sequence else model
            own = task.phases()
            key = _key(plan, task, own, start, (0, 0), NOT_THERE_YET) if len(plan.points) > 1 else ""
            reached[task.method] = f"{start} {task.request.label} {task.method}"
            if key and key in served:
                continue
            served.add(key)
            for phase in own:
                yield task, phase


def _key(plan: Plan, task: Task, phases: list[Phase], start: str, storage: tuple[int, int], device: str) -> str:
    point, federation = task.point, task.federation
    method = point.job.methods_by_name[task.method]
    if method.name not in METHODS or method.uses_synthetic:
        return ""
    if any(phase.view.source != "real" or phase.learns for phase in phases):
        return ""
    try:
        depends = {
            "versions": [__version__, VERSION],
            "method": [method.name, method.module],
            "phases": [_plain(phase) for phase in phases],
            "sizes": [task.sizes(phase).tolist() for phase in phases],
            "request": _plain(task.request),
            "start": start,
            "storage": list(storage),
            "seed": federation.seed,
            "data": plan.data_sha256,
            "partition": federation.partition.sha256,
            "model": point.model.describe(),
            "membership": list(point.job.membership),
            "sequence": point.job.sequence,
            "numerics": asdict(point.job.cluster.numerics()),
            "device": device,
        }
    except _Unknown:
        return ""
    return hashlib.sha256(_text(depends).encode()).hexdigest()[:32]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, the same for equal ones alone; raise for what may hide something."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, History):
        stored = value.to_arrays() if value.rounds else {}
        return {name: _digest(array) for name, array in sorted(stored.items())}
    if isinstance(value, np.ndarray):
        return _digest(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [_name(type(value)), {field.name: _plain(getattr(value, field.name)) for field in fields(value)}]
    if isinstance(value, partial):
        return ["partial", _plain(value.func), _plain(list(value.args)), _plain(value.keywords)]
    if isinstance(value, FunctionType) and value.__closure__ is None and "<" not in value.__qualname__:
        return _name(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(kept) for key, kept in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_plain(kept) for kept in value]
    if isinstance(value, frozenset | set):
        return sorted(_text(_plain(kept)) for kept in value)
    raise _Unknown


def _name(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"


def _digest(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
