"""Federations to measure: made images, a job, and the engine's own round loop on Ray with nothing around it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qdsim.algorithms.phase import Phase
from qdsim.data.datasets import SHAPES, Dataset, Pixels
from qdsim.experiment import plan
from qdsim.experiment.config import Job
from qdsim.experiment.plan import Cell, SeedPlan
from qdsim.federation.chaos import Chaos
from qdsim.federation.client_host import Shard
from qdsim.federation.rounds import Executor, RoundResult, run_rounds
from qdsim.ray_engine import environment

SEED = 0
DIGITS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
"""Training images of each digit in MNIST; CIFAR-10 has 5,000 of each class."""


def noise(train: int, channels: int, size: int, *, test: int = 10, counts: tuple[int, ...] | None = None) -> Dataset:
    """Return made images of ten classes, of equal size unless ``counts`` says otherwise."""
    rng = np.random.default_rng(SEED)
    # a few thousand images, over and over: what lies in memory matters, not what it shows
    few = rng.integers(0, 256, (min(train, 5000), channels, size, size), dtype=np.uint8)
    images = few[np.arange(train) % len(few)]
    labels = np.repeat(np.arange(10), counts) if counts else np.arange(train) % 10
    pixels = Pixels((0.5,) * channels, (0.25,) * channels)
    return Dataset("noise", images, labels, images[:test], labels[:test], 10, pixels)


def like(dataset: str) -> Dataset:
    """Return made images in the number, shape and classes of a known data set."""
    train, _, channels, size, _ = SHAPES[dataset]
    return noise(train, channels, size, counts=DIGITS if dataset == "mnist" else None)


def job(**sections: dict[str, Any]) -> Job:
    """Return a job of which only the sections that are given matter."""
    return Job.model_validate({"name": "bench", **sections})


@dataclass(frozen=True)
class Federation:
    """A federation whose actors stand ready."""

    cell: Cell
    at: SeedPlan
    executor: Executor

    def rounds(self, phase: Phase, count: int) -> list[tuple[RoundResult, float]]:
        """Run rounds of a phase from a fresh model, without evaluation, rows or commits; return each with its time."""
        model = self.cell.model
        params = model.init(torch.Generator().manual_seed(SEED))
        phase = replace(phase, stage=replace(phase.stage, rounds=count))
        sizes = self.cell.sizes(phase, self.at)
        found = []
        began_s = time.perf_counter()
        for result in run_rounds(phase, params, sizes, self.executor, SEED, "", lambda *_: None, keep=_keep(phase)):
            ended_s = time.perf_counter()
            found.append((result, ended_s - began_s))
            began_s = ended_s
        return found


def _keep(phase: Phase) -> Any:
    """States that change are kept nowhere: what is measured is the step."""
    return "nowhere" if phase.learns else None


@contextmanager
def on_ray(wanted: Job, dataset: Dataset) -> Iterator[Federation]:
    """Start a local cluster and the job's actors for the duration of the block."""
    environment.prepare(None)  # before Ray is imported
    import ray

    from qdsim.ray_engine import cluster, worker_group
    from qdsim.ray_engine.executor import RayExecutor

    planned = plan.make(wanted, dataset)
    cell, at = next(planned.federations())
    with cluster.connected(wanted.cluster, None):
        refs = [ray.put(array) for array in (dataset.train_images, dataset.test_images, dataset.test_labels)]
        crew = worker_group.start(planned, "bench", refs, dataset.pixels, lambda _: None)
        executor = RayExecutor(planned, crew, Chaos([], Path()), lambda _: None)
        parts = zip(at.partition.indices, at.labels, strict=True)
        shards = [Shard(i, indices, labels) for i, (indices, labels) in enumerate(parts)]
        executor.adopt(cell.model, at.seed, shards, cell.hyper.synthetic if cell.distils else None)
        yield Federation(cell, at, executor)
