"""Federations to measure: made images, a job, and the engine's own round loop on Ray with nothing around it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qdsim.algorithms.phase import Phase
from qdsim.data.datasets import SHAPES, Dataset, Normalization
from qdsim.experiment import plan
from qdsim.experiment.config import Job, validate
from qdsim.experiment.plan import FederationPlan, SweepPoint
from qdsim.federation.chaos import Chaos
from qdsim.federation.client_host import Shard
from qdsim.federation.executor import Executor
from qdsim.federation.rounds import Round, run_phase
from qdsim.models.params import Params
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
    normalization = Normalization((0.5,) * channels, (0.25,) * channels)
    return Dataset("noise", images, labels, images[:test], labels[:test], 10, normalization)


def like(dataset: str) -> Dataset:
    """Return made images in the number, shape and classes of a known data set."""
    train, _, channels, size, _ = SHAPES[dataset]
    return noise(train, channels, size, counts=DIGITS if dataset == "mnist" else None)


def job(**sections: dict[str, Any]) -> Job:
    """Return a job of which only the sections that are given matter."""
    return validate({"name": "bench", **sections})


@dataclass(frozen=True)
class Federation:
    """A federation whose actors stand ready."""

    point: SweepPoint
    at: FederationPlan
    executor: Executor

    def rounds(self, phase: Phase, count: int) -> list[tuple[Round, float]]:
        """Run rounds of a phase from a fresh model, without evaluation, rows or commits; return each with its time."""
        params = self.point.model.init(torch.Generator().manual_seed(SEED))
        phase = replace(phase, stage=replace(phase.stage, rounds=count))
        timer = _Timer()
        run_phase(phase, params, self.point.sizes(phase, self.at), self.executor, timer, run_seed=SEED)
        times = [end - begin for begin, end in pairwise(timer.marks_s)]
        return list(zip(timer.rounds, times, strict=True))


class _Timer:
    """Observes the round loop and does nothing but look at the clock."""

    def __init__(self) -> None:
        self.marks_s = [time.perf_counter()]
        self.rounds: list[Round] = []

    def progress(self, round_number: int, expected: int, done: int) -> None:
        """Nobody watches."""

    def evaluate(self, params: Params) -> None:
        """A round has ended."""
        self.marks_s.append(time.perf_counter())

    def commit(self, finished: Round) -> bool:
        """Keep what the round was; states that change are kept nowhere: what is measured is the step."""
        self.rounds.append(finished)
        return False


@contextmanager
def on_ray(wanted: Job, dataset: Dataset) -> Iterator[Federation]:
    """Start a local cluster and the job's actors for the duration of the block."""
    environment.prepare(None)  # before Ray is imported
    import ray

    from qdsim.ray_engine import cluster
    from qdsim.ray_engine.executor import RayExecutor
    from qdsim.ray_engine.worker_group import start_workers

    planned = plan.build_plan(wanted, dataset)
    point, at = next(planned.federations())
    with cluster.connected(wanted.cluster, None):
        refs = [ray.put(array) for array in (dataset.train_images, dataset.test_images, dataset.test_labels)]
        group = start_workers(planned, "bench", refs, dataset.normalization, lambda _: None)
        executor = RayExecutor(wanted.cluster, group, Chaos([], Path()), lambda _: None)
        parts = zip(at.partition.indices, at.labels, strict=True)
        shards = [Shard(i, indices, labels) for i, (indices, labels) in enumerate(parts)]
        synthetic = point.hyper.synthetic if point.distils else None
        executor.broadcast("assign_clients", point.model, at.seed, shards, synthetic, setup=True)
        yield Federation(point, at, executor)
