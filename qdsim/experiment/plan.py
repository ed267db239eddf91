"""From a job and its data to what will be run; whatever only the data can refuse is refused here."""

import itertools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qdsim import plugins, seeds
from qdsim.algorithms import fedavg, quickdrop, server
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS, Method
from qdsim.algorithms.phase import Phase
from qdsim.algorithms.settings import Hyperparameters
from qdsim.algorithms.stopping import TRAINED
from qdsim.data import partition
from qdsim.data.datasets import Dataset
from qdsim.data.forgetting import NOTHING, ForgetSet, UnlearningRequest, View
from qdsim.data.partition import Partition
from qdsim.errors import BadInput
from qdsim.experiment.config import Job
from qdsim.experiment.sections import Request
from qdsim.federation import membership
from qdsim.models.convnet import ConvNet
from qdsim.models.kinds import CONVNET
from qdsim.models.model import Model
from qdsim.models.module import ModuleModel, checked_model
from qdsim.store.run_directory import part_name, round_stem

UNKNOWN = History()
"""Before training there is no history; phases are planned without it."""
SHARED = "shared"
"""The method's name in rows of training."""
TRAINING = UnlearningRequest("", NOTHING)
IN_TRAINING = -1
REQUEST_PHASES = ("unlearn", "recover", "relearn")
"""The phases that a method may have, by their names in the tables."""


@dataclass(frozen=True)
class FederationPlan:
    """One federation: who holds what, and what will be asked of it."""

    seed: int
    partition: Partition
    labels: tuple[np.ndarray, ...]
    """Labels of each client's samples."""
    requests: tuple[UnlearningRequest, ...]


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep: the job there, and the federations it trains, one a seed."""

    label: str
    """``synthetic.scale=10``; empty without a sweep."""
    job: Job
    hyper: Hyperparameters
    model: Model
    federations: tuple[FederationPlan, ...]

    @property
    def distils(self) -> bool:
        """Tell whether any method needs synthetic sets."""
        return any(method.uses_synthetic for method in self.job.methods_by_name.values())

    def training(self) -> list[Phase]:
        """Return the phases that all methods share."""
        if self.distils:
            return quickdrop.training(self.hyper)
        return [fedavg.phase("train", self.hyper.train, View("real"), TRAINED, self.hyper.server)]

    def phases(
        self, method: str, federation: FederationPlan, request: UnlearningRequest, history: History = UNKNOWN
    ) -> list[Phase]:
        """Return a method's phases for a request: those with rounds to run and samples to run on.

        In a sequence nothing is relearned, since the next request builds on what was forgotten.
        """
        found = _phases_of(self.job.methods_by_name[method], self.hyper, request, history)
        skipped = {"relearn"} if self.job.sequence else set()
        return [p for p in found if p.name not in skipped and p.stage.rounds and self.sizes(p, federation).any()]

    def sizes(self, phase: Phase, federation: FederationPlan) -> np.ndarray:
        """Return |Z_i| of every client."""
        split = federation.partition
        return phase.view.sizes(split.counts, split.synthetic_counts(self.hyper.synthetic.scale))


class PhaseKey(NamedTuple):
    """What names a phase in every table."""

    seed: int
    cell: str
    method: str
    request: str
    phase: str

    @property
    def part(self) -> str:
        """The name of the phase's part in a table; without a phase, that of the task or training."""
        return part_name(self.cell, self.seed, self.method, self.request, self.phase)

    def round_part(self, round_number: int) -> str:
        """Return the name of a round's part."""
        return round_stem(self.part, round_number)

    def columns(self) -> dict[str, Any]:
        """Return it as columns of a row."""
        return self._asdict()


@dataclass(frozen=True)
class Task:
    """What a method does for a request, from the model that a federation trained; or that training itself."""

    point: SweepPoint
    federation: FederationPlan
    method: str
    request: UnlearningRequest
    index: int = IN_TRAINING
    """Position in the plan's tasks; -1 for training."""

    def key(self, phase: str = "") -> PhaseKey:
        """Return what names one of its phases in every table."""
        return PhaseKey(self.federation.seed, self.point.label, self.method, self.request.label, phase)

    def phases(self, history: History = UNKNOWN) -> list[Phase]:
        """Return what there is to do."""
        if self.index == IN_TRAINING:
            return self.point.training()
        return self.point.phases(self.method, self.federation, self.request, history)

    def sizes(self, phase: Phase) -> np.ndarray:
        """Return |Z_i| of every client."""
        return self.point.sizes(phase, self.federation)


@dataclass(frozen=True)
class Plan:
    """All that an experiment needs beside the images themselves."""

    job: Job
    points: tuple[SweepPoint, ...]
    test_labels: np.ndarray
    data_sha256: str

    @property
    def max_clients(self) -> int:
        """The most clients that any point has: one set of actors serves all."""
        return max(point.job.partition.clients for point in self.points)

    def federations(self) -> Iterator[tuple[SweepPoint, FederationPlan]]:
        """Yield what is trained, in the order of training."""
        for point in self.points:
            for federation in point.federations:
                yield point, federation

    def tasks(self) -> list[Task]:
        """Return every method and request of every federation, in the order they are worked through."""
        return [task for _, own in self.trainings() for task in own]

    def trainings(self) -> Iterator[tuple[Task, list[Task]]]:
        """Yield each federation's training with the tasks that begin from it, in the order they are worked through."""
        index = 0
        for point, federation in self.federations():
            pairs = itertools.product(point.job.methods_by_name, federation.requests)
            own = [Task(point, federation, *pair, index=n) for n, pair in enumerate(pairs, index)]
            index += len(own)
            yield training_task(point, federation), own


def training_task(point: SweepPoint, federation: FederationPlan) -> Task:
    """Return the training that all methods of a federation share."""
    return Task(point, federation, SHARED, TRAINING)


def build_plan(job: Job, dataset: Dataset) -> Plan:
    """Split the data for each point and seed, and resolve the requests."""
    requests = _numbered(job, dataset)
    for name in job.membership:
        membership.check_attack(name, {request.kind for request in requests})
    splits: dict[str, Partition] = {}
    points = tuple(_plan_point(label, point, dataset, requests, splits) for label, point in job.sweep_points())
    return Plan(job, points, dataset.test_labels, dataset.sha256())


def _plan_point(
    label: str, job: Job, dataset: Dataset, requests: list[Request], splits: dict[str, Partition]
) -> SweepPoint:
    model = _network(job, dataset)
    if job.server.kind not in server.RULES:
        server.check_rule(job.server, model.init(seeds.generator(job.seeds[0], "init", request="", phase="train")))
    plans = []
    for seed in job.seeds:
        wanted = f"{seed} {job.partition!r}"
        if wanted not in splits:
            splits[wanted] = _split(job, dataset, seed)
        split = splits[wanted]
        labels = tuple(dataset.train_labels[rows] for rows in split.indices)
        plans.append(FederationPlan(seed, split, labels, _resolve_requests(job, requests, split, seed)))
    return SweepPoint(label, job, job.hyperparameters(model), model, tuple(plans))


def _network(job: Job, dataset: Dataset) -> Model:
    """Return the network for these images; refuse one that cannot take them, or that a method cannot work with."""
    channels, size, _ = dataset.train_images.shape[1:]
    wanted = job.model
    found: Model
    if wanted.kind == CONVNET:
        autograd = wanted.gradients == "autograd"
        found = ConvNet(channels, size, dataset.num_classes, wanted.width, wanted.depth, autograd)
        if found.feature_size < 1:
            deepest = int(np.log2(size + 2 * found.first_padding - 2))
            raise BadInput("model.depth", wanted.depth, f"{size}x{size} images allow a depth of {deepest} at most")
    else:
        options = json.dumps(wanted.options, sort_keys=True)
        distils = any(method.uses_synthetic for method in job.methods_by_name.values())
        model = ModuleModel(wanted.kind, channels, size, dataset.num_classes, options)
        found = checked_model(model, distils=distils)
    for name, method in job.methods_by_name.items():
        with _their_code(method, "refuses"):
            reason = getattr(method.load(), "refuses", lambda model: None)(found)
        if reason:
            why = f"{method.title} cannot serve it: {reason}"
            raise BadInput("model.kind", wanted.kind, f"{why}; leave {name} out of methods")
    return found


def _their_code(method: Method, function: str) -> AbstractContextManager[None]:
    """Have what a method's own code raises in one line, where it is from outside; in qdsim's own it is our mistake."""
    return nullcontext() if method.name in METHODS else plugins.calling("methods", method.name, f"its {function}()")


def storage_of(method: Method, hyper: Hyperparameters, request: UnlearningRequest, history: History) -> tuple[int, int]:
    """Return what a method stores for unlearning, in bytes: measured, and by the accounting of its paper."""
    stored = getattr(method.load(), "storage_bytes", None)
    if stored is None:
        return 0, 0
    with _their_code(method, "storage_bytes"):
        measured, nominal = map(int, stored(hyper, hyper.methods.get(method.name), request, history))
    return measured, nominal


def _phases_of(method: Method, hyper: Hyperparameters, request: UnlearningRequest, history: History) -> list[Phase]:
    """Ask a method for its phases; what one from outside returns is checked before anything runs."""
    phases = method.load().phases
    with _their_code(method, "phases"):
        found = phases(hyper, hyper.methods.get(method.name), request, history)
    if method.name in METHODS:
        return list(found)
    if not isinstance(found, list | tuple) or not all(isinstance(phase, Phase) for phase in found) or not found:
        what = repr(found)
        if isinstance(found, list | tuple):
            what = f"a list of {', '.join(sorted({type(phase).__name__ for phase in found})) or 'nothing'}"
        raise BadInput("methods", method.name, f"its phases() returned {what[:80]}; wanted is a list of Phase")
    for phase in found:
        _check_phase(method, phase)
    names = [phase.name for phase in found]
    if len(set(names)) < len(names):
        raise BadInput("methods", method.name, f"its phases are {', '.join(names)}: each name may stand once")
    return list(found)


def _check_phase(method: Method, phase: Phase) -> None:
    """Refuse a phase whose name the tables do not know, or whose functions cannot be called as the round loop does."""
    if phase.name not in REQUEST_PHASES:
        allowed = ", ".join(REQUEST_PHASES)
        raise BadInput("methods", method.name, f"a phase is named {phase.name!r}; allowed: {allowed}")
    calls: dict[str, tuple[tuple[None, ...], dict[str, None]]] = {
        "client_step": ((None, None), {"ctx": None, "compute": None}),
        "server_step": ((None, None, None), {}),
        "select": ((None, None), {}),
    }
    for name, (positional, keywords) in calls.items():
        why = plugins.misfit(getattr(phase, name), *positional, **keywords)
        if why:
            raise BadInput("methods", method.name, f"the {name} of its phase {phase.name}: {why}")


def _numbered(job: Job, dataset: Dataset) -> list[Request]:
    """Return the requests with numbers for the names of classes; refuse a class that is not there."""
    found = []
    names = list(dataset.class_names)
    for i, request in enumerate(job.requests):
        key, target = f"requests[{i}].target", request.target
        if isinstance(target, str) and target != "random":
            if target not in names:
                has = f"its classes are {', '.join(names)}" if names else "its classes have numbers only"
                raise BadInput(key, target, f"no class of {dataset.name}: {has}")
            request = request.model_copy(update={"target": names.index(target)})
        if request.target != "random" and request in found:
            raise BadInput(key, target, f"class {request.target} is listed before; each request may be listed once")
        found.append(request)
    _check_classes(found, dataset)
    return found


def _check_classes(requests: list[Request], dataset: Dataset) -> None:
    present = np.bincount(dataset.train_labels, minlength=dataset.num_classes)
    last = dataset.num_classes - 1
    for i, request in enumerate(requests):
        if request.kind != "class" or not isinstance(request.target, int):
            continue
        if request.target > last:
            allowed = f"classes of {dataset.name} are numbered 0 to {last}"
            raise BadInput(f"requests[{i}].target", request.target, allowed)
        if not present[request.target]:
            raise BadInput(f"requests[{i}].target", request.target, "no client has a training sample of this class")


def _split(job: Job, dataset: Dataset, seed: int) -> Partition:
    wanted = job.partition
    own_seed = wanted.seed
    if own_seed is None:
        own_seed = partition.OFFICIAL_SEED if wanted.kind == "official" else seed
    return partition.split(
        dataset.train_labels,
        dataset.num_classes,
        kind=wanted.kind,
        clients=wanted.clients,
        alpha=wanted.alpha,
        seed=own_seed,
        min_size=wanted.min_size,
    )


def _resolve_requests(job: Job, requests: list[Request], split: Partition, seed: int) -> tuple[UnlearningRequest, ...]:
    """Resolve random targets and, in a sequence, what was forgotten before each request."""
    resolved: list[UnlearningRequest] = []
    previously = NOTHING
    chosen: set[tuple[str, int | str]] = {(r.kind, r.target) for r in requests}
    for i, asked in enumerate(requests):
        target = asked.target
        if target == "random":
            target = _draw(asked, i, split, seed, chosen)
        chosen.add((asked.kind, target))
        label = f"{asked.kind}:{target}"
        one = frozenset([int(target)])
        forget = ForgetSet(classes=one) if asked.kind == "class" else ForgetSet(clients=one)
        request = UnlearningRequest(f"{i + 1}:{label}" if job.sequence else label, forget, previously)
        key = f"requests[{i}].target"
        if not View("real", only=forget, without=previously).sizes(split.counts, split.counts).any():
            raise BadInput(key, target, f"nothing is left of {label} after the requests before it (seed {seed})")
        remaining = View("real", without=request.forgotten).sizes(split.counts, split.counts).sum()
        if not remaining and not (job.sequence and i == len(requests) - 1):
            raise BadInput(key, target, f"forgetting {label} would leave no data (seed {seed})")
        resolved.append(request)
        if job.sequence:
            previously = request.forgotten
    return tuple(resolved)


def _draw(request: Request, i: int, split: Partition, seed: int, taken: set[tuple[str, int | str]]) -> int:
    counts = split.counts.sum(0 if request.kind == "class" else 1)
    free = [int(t) for t in np.flatnonzero(counts) if (request.kind, int(t)) not in taken]
    if not free:
        raise BadInput(f"requests[{i}].target", "random", f"every {request.kind} is forgotten by another request")
    rng = seeds.numpy_generator(seed, "target", request=f"{i}:{request.kind}")
    return free[int(rng.integers(len(free)))]
