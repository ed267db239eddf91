"""From a job and its data to what will be run; whatever only the data can refuse is refused here."""

from collections.abc import Iterator
from dataclasses import dataclass

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
from qdsim.data.forgetting import NOTHING, Branch, ForgetSet, View
from qdsim.data.partition import Partition
from qdsim.errors import BadInput
from qdsim.experiment.config import Job
from qdsim.experiment.sections import Request
from qdsim.models.convnet import ConvNet

MATCHED_IMAGE_COST = 3.0
"""A synthetic image in a matching step against a real one in a gradient, roughly: it is differentiated twice."""
UNKNOWN = History()
"""Before training there is no history; phases are planned without it."""


@dataclass(frozen=True)
class SeedPlan:
    """One federation: who holds what, and what will be asked of it."""

    seed: int
    partition: Partition
    labels: tuple[np.ndarray, ...]
    """Labels of each client's samples."""
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: the job there, and the federations it trains, one a seed."""

    label: str
    """``synthetic.scale=10``; empty without a sweep."""
    job: Job
    hyper: Hyperparameters
    model: ConvNet
    seeds: tuple[SeedPlan, ...]

    @property
    def distils(self) -> bool:
        """Tell whether any method needs synthetic sets."""
        return any(METHODS[name].uses_synthetic for name in self.job.methods)

    def training(self) -> list[Phase]:
        """Return the phases that all methods share."""
        if self.distils:
            return quickdrop.training(self.hyper)
        return [fedavg.phase("train", self.hyper.train, View("real"), TRAINED)]

    def phases(self, method: str, seed_plan: SeedPlan, branch: Branch, history: History = UNKNOWN) -> list[Phase]:
        """Return a method's phases for a request: those with rounds to run and samples to run on.

        In a sequence nothing is relearned, since the next request builds on what was forgotten.
        """
        found: list[Phase] = METHODS[method].load().phases(self.hyper, self.hyper.methods.get(method), branch, history)
        skipped = {"relearn"} if self.job.sequence else set()
        return [p for p in found if p.name not in skipped and p.stage.rounds and self.sizes(p, seed_plan).any()]

    def sizes(self, phase: Phase, seed_plan: SeedPlan) -> np.ndarray:
        """Return |Z_i| of every client."""
        split = seed_plan.partition
        return phase.view.sizes(split.counts, split.synthetic_counts(self.hyper.synthetic.scale))

    def work(self, phase: Phase, seed_plan: SeedPlan) -> float:
        """Estimate a phase's cost in samples, for the time left and nothing else."""
        stage, hyper = phase.stage, self.hyper
        a_step = np.minimum(self.sizes(phase, seed_plan), stage.batch_size).astype(float)
        if phase.name in ("train", "finetune") and self.distils and hyper.synthetic.matching:
            matched = seed_plan.partition.synthetic_counts(hyper.synthetic.scale).sum(1)
            a_step += MATCHED_IMAGE_COST * np.minimum(matched, hyper.synthetic.batch)
        return stage.rounds * stage.participation * stage.steps * float(a_step.sum())


@dataclass(frozen=True)
class Task:
    """One line of the plan: a method serves a request from the model that a seed's federation trained."""

    cell: Cell
    seed_plan: SeedPlan
    method: str
    branch: Branch

    @property
    def name(self) -> str:
        """A name that is unique in the run and fit for a file."""
        names = (self.cell.label, f"seed-{self.seed_plan.seed}", self.method, self.branch.label)
        return "-".join(name for name in names if name)

    def phases(self, history: History = UNKNOWN) -> list[Phase]:
        """Return what there is to do."""
        return self.cell.phases(self.method, self.seed_plan, self.branch, history)


@dataclass(frozen=True)
class Plan:
    """All that an experiment needs beside the images themselves."""

    job: Job
    cells: tuple[Cell, ...]
    test_labels: np.ndarray
    data_sha256: str

    @property
    def max_clients(self) -> int:
        """The most clients that any cell has: one set of actors serves all."""
        return max(cell.job.partition.clients for cell in self.cells)

    def federations(self) -> Iterator[tuple[Cell, SeedPlan]]:
        """Yield what is trained, in the order of training."""
        for cell in self.cells:
            for seed_plan in cell.seeds:
                yield cell, seed_plan

    def tasks(self) -> list[Task]:
        """Return every method and request of every federation, in the order they are worked through."""
        return [
            Task(cell, seed_plan, method, branch)
            for cell, seed_plan in self.federations()
            for method in cell.job.methods
            for branch in seed_plan.branches
        ]

    def total_work(self) -> float:
        """Estimate the cost of the whole plan."""
        total = sum(cell.work(phase, at) for cell, at in self.federations() for phase in cell.training())
        for task in self.tasks():
            total += sum(task.cell.work(phase, task.seed_plan) for phase in task.phases())
        return total


def make(job: Job, dataset: Dataset) -> Plan:
    """Split the data for each cell and seed, and resolve the requests."""
    _check_requests(job, dataset)
    splits: dict[str, Partition] = {}
    cells = tuple(_make_cell(label, point, dataset, splits) for label, point in job.cells())
    return Plan(job, cells, dataset.test_labels, dataset.sha256())


def _make_cell(label: str, job: Job, dataset: Dataset, splits: dict[str, Partition]) -> Cell:
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
        plans.append(SeedPlan(seed, split, labels, _branches(job, split, seed)))
    return Cell(label, job, job.hyperparameters(dataset.num_classes), model, tuple(plans))


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


def _branches(job: Job, split: Partition, seed: int) -> tuple[Branch, ...]:
    """Resolve random targets and, in a sequence, what was forgotten before each request."""
    branches: list[Branch] = []
    earlier = NOTHING
    chosen: set[tuple[str, int | str]] = {(r.kind, r.target) for r in job.requests}
    for i, request in enumerate(job.requests):
        target = request.target
        if target == "random":
            target = _draw(request, i, split, seed, chosen)
        chosen.add((request.kind, target))
        label = f"{request.kind}:{target}"
        one = frozenset([int(target)])
        forget = ForgetSet(classes=one) if request.kind == "class" else ForgetSet(clients=one)
        branch = Branch(f"{i + 1}:{label}" if job.sequence else label, forget, earlier)
        key, number = f"requests[{i}].target", target
        if not View("real", only=forget, without=earlier).sizes(split.counts, split.counts).any():
            raise BadInput(key, number, f"nothing is left of {label} after the requests before it (seed {seed})")
        remaining = View("real", without=branch.gone).sizes(split.counts, split.counts).sum()
        if not remaining and not (job.sequence and i == len(job.requests) - 1):
            raise BadInput(key, number, f"forgetting {label} would leave no data (seed {seed})")
        branches.append(branch)
        if job.sequence:
            earlier = branch.gone
    return tuple(branches)


def _draw(request: Request, i: int, split: Partition, seed: int, taken: set[tuple[str, int | str]]) -> int:
    counts = split.counts.sum(0 if request.kind == "class" else 1)
    free = [int(t) for t in np.flatnonzero(counts) if (request.kind, int(t)) not in taken]
    if not free:
        raise BadInput(f"requests[{i}].target", "random", f"every {request.kind} is forgotten by another request")
    rng = seeds.numpy_generator(seed, "target", request=f"{i}:{request.kind}")
    return free[int(rng.integers(len(free)))]
