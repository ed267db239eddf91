"""From a job and its data to what will be run; whatever only the data can refuse is refused here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qdsim import seeds
from qdsim.algorithms import fedavg, quickdrop
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
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
from qdsim.models.convnet import ConvNet
from qdsim.store.run_directory import part_name, round_stem

MATCHED_IMAGE_COST = 3.0
"""A synthetic image in a matching step against a real one in a gradient, roughly: it is differentiated twice."""
UNKNOWN = History()
"""Before training there is no history; phases are planned without it."""
SHARED = "shared"
"""The method's name in rows of training."""
TRAINING = UnlearningRequest("", NOTHING)
IN_TRAINING = -1


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
    model: ConvNet
    federations: tuple[FederationPlan, ...]

    @property
    def distils(self) -> bool:
        """Tell whether any method needs synthetic sets."""
        return any(METHODS[name].uses_synthetic for name in self.job.methods)

    def training(self) -> list[Phase]:
        """Return the phases that all methods share."""
        if self.distils:
            return quickdrop.training(self.hyper)
        return [fedavg.phase("train", self.hyper.train, View("real"), TRAINED)]

    def phases(
        self, method: str, federation: FederationPlan, request: UnlearningRequest, history: History = UNKNOWN
    ) -> list[Phase]:
        """Return a method's phases for a request: those with rounds to run and samples to run on.

        In a sequence nothing is relearned, since the next request builds on what was forgotten.
        """
        found: list[Phase] = METHODS[method].load().phases(self.hyper, self.hyper.methods.get(method), request, history)
        skipped = {"relearn"} if self.job.sequence else set()
        return [p for p in found if p.name not in skipped and p.stage.rounds and self.sizes(p, federation).any()]

    def sizes(self, phase: Phase, federation: FederationPlan) -> np.ndarray:
        """Return |Z_i| of every client."""
        split = federation.partition
        return phase.view.sizes(split.counts, split.synthetic_counts(self.hyper.synthetic.scale))

    def work(self, phase: Phase, federation: FederationPlan) -> float:
        """Estimate a phase's cost in samples, for the time left and nothing else."""
        stage, hyper = phase.stage, self.hyper
        a_step = np.minimum(self.sizes(phase, federation), stage.batch_size).astype(float)
        if phase.name in ("train", "finetune") and self.distils and hyper.synthetic.matching:
            matched = federation.partition.synthetic_counts(hyper.synthetic.scale).sum(1)
            a_step += MATCHED_IMAGE_COST * np.minimum(matched, hyper.synthetic.batch)
        return stage.rounds * stage.participation * stage.steps * float(a_step.sum())


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

    def work(self, phase: Phase) -> float:
        """Estimate a phase's cost in samples, for the time left and nothing else."""
        return self.point.work(phase, self.federation)


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
        found = [
            (point, federation, method, request)
            for point, federation in self.federations()
            for method in point.job.methods
            for request in federation.requests
        ]
        return [Task(*each, index=index) for index, each in enumerate(found)]

    def total_work(self) -> float:
        """Estimate the cost of the whole plan."""
        tasks = [*(training_task(point, at) for point, at in self.federations()), *self.tasks()]
        return sum(task.work(phase) for task in tasks for phase in task.phases())


def training_task(point: SweepPoint, federation: FederationPlan) -> Task:
    """Return the training that all methods of a federation share."""
    return Task(point, federation, SHARED, TRAINING)


def build_plan(job: Job, dataset: Dataset) -> Plan:
    """Split the data for each point and seed, and resolve the requests."""
    _check_requests(job, dataset)
    splits: dict[str, Partition] = {}
    points = tuple(_plan_point(label, point, dataset, splits) for label, point in job.sweep_points())
    return Plan(job, points, dataset.test_labels, dataset.sha256())


def _plan_point(label: str, job: Job, dataset: Dataset, splits: dict[str, Partition]) -> SweepPoint:
    channels, size, _ = dataset.train_images.shape[1:]
    model = ConvNet(channels, size, dataset.num_classes, job.model.width, job.model.depth)
    if model.feature_size < 1:
        deepest = int(np.log2(size + 2 * model.first_padding - 2))
        raise BadInput("model.depth", job.model.depth, f"{size}x{size} images allow a depth of {deepest} at most")
    plans = []
    for seed in job.seeds:
        wanted = f"{seed} {job.partition!r}"
        if wanted not in splits:
            splits[wanted] = _split(job, dataset, seed)
        split = splits[wanted]
        labels = tuple(dataset.train_labels[rows] for rows in split.indices)
        plans.append(FederationPlan(seed, split, labels, _resolve_requests(job, split, seed)))
    return SweepPoint(label, job, job.hyperparameters(dataset.num_classes), model, tuple(plans))


def _check_requests(job: Job, dataset: Dataset) -> None:
    present = np.bincount(dataset.train_labels, minlength=dataset.num_classes)
    last = dataset.num_classes - 1
    for i, request in enumerate(job.requests):
        if request.kind != "class" or request.target == "random":
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


def _resolve_requests(job: Job, split: Partition, seed: int) -> tuple[UnlearningRequest, ...]:
    """Resolve random targets and, in a sequence, what was forgotten before each request."""
    resolved: list[UnlearningRequest] = []
    previously = NOTHING
    chosen: set[tuple[str, int | str]] = {(r.kind, r.target) for r in job.requests}
    for i, asked in enumerate(job.requests):
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
        if not remaining and not (job.sequence and i == len(job.requests) - 1):
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
