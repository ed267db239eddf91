"""What one sample costs on a machine: a few steps of one client, measured where the clients will run."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
import torch

from qdsim.algorithms import fedavg, quickdrop
from qdsim.algorithms.phase import RoundContext
from qdsim.algorithms.settings import Hyperparameters
from qdsim.algorithms.stopping import TRAINED
from qdsim.clocks import Stopwatch
from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import View
from qdsim.experiment.plan import Plan
from qdsim.experiment.work import Costs
from qdsim.federation.client_host import ClientHost, Images, Shard
from qdsim.models.compute import make_compute
from qdsim.models.device import set_up
from qdsim.models.model import Model
from qdsim.models.numerics import Numerics

STEPS = 4
EVALUATED = 1000
MOST_SAMPLES = 4000
SEED = 0


@dataclass(frozen=True)
class ProbeClient:
    """What a probe works with: the network, its settings, and the labels of one client. The images are noise."""

    model: Model
    hyper: Hyperparameters
    distils: bool
    labels: np.ndarray
    numerics: Numerics


def probe_client(plan: Plan) -> ProbeClient:
    """Return the client of the first federation whose steps are about as long as the average one's."""
    point, at = next(plan.federations())
    batch = np.minimum([len(labels) for labels in at.labels], point.hyper.train.batch_size)
    work = batch + at.partition.synthetic_counts(point.hyper.synthetic.scale).sum(1)
    chosen = int(np.abs(work - work.mean()).argmin())
    labels = at.labels[chosen][:: max(1, len(at.labels[chosen]) // MOST_SAMPLES)]
    return ProbeClient(point.model, point.hyper, point.distils, labels, point.job.cluster.numerics())


def measure(sample: ProbeClient, device: torch.device | None = None) -> Costs:
    """Run a few steps of each kind in this process.

    The clock is that of ``compute_s``, CPU time or device time: what else the machine does at the moment is left out.
    """
    set_up(sample.numerics)
    device = device or torch.device("cpu")
    rng = np.random.default_rng(SEED)
    shape = (sample.model.channels, sample.model.size, sample.model.size)
    pool = rng.integers(0, 256, (max(len(sample.labels), EVALUATED), *shape), dtype=np.uint8)
    normalization = Normalization((0.5,) * shape[0], (0.25,) * shape[0])
    compute = make_compute(sample.model, device, sample.numerics)
    host = ClientHost(compute, Images(pool, pool, np.zeros(len(pool), np.int64), normalization))
    shard = Shard(0, np.arange(len(sample.labels)), sample.labels)
    host.assign_clients(sample.model, SEED, [shard], sample.hyper.synthetic if sample.distils else None)
    params = sample.model.init(torch.Generator().manual_seed(SEED))
    hyper = replace(sample.hyper, train=replace(sample.hyper.train, steps=STEPS))
    ctx = RoundContext(SEED, "", "train", 1)
    kinds = [fedavg.phase("train", hyper.train, View("real"), TRAINED)]
    if sample.distils:
        kinds.append(quickdrop.training(hyper)[0])
    found = []
    for phase in kinds:
        host.step(params, phase.client_step, 0, ctx)  # the first allocates
        found.append(host.step(params, phase.client_step, 0, ctx))
    plain, learning = found[0], found[-1]
    host.test_counts(params, 0, EVALUATED)
    watch = Stopwatch(device)
    with watch:
        host.test_counts(params, 0, EVALUATED)
    return Costs(
        gradient_s=plain.compute_s / plain.samples,
        learning_s=(learning.compute_s - learning.matching_s) / learning.samples,
        matching_s=learning.matching_s / (STEPS * _matched(sample)),
        evaluation_s=watch.seconds / EVALUATED,
    )


def _matched(sample: ProbeClient) -> int:
    """Return how many synthetic images a training step matches."""
    settings = sample.hyper.synthetic
    _, counts = np.unique(sample.labels, return_counts=True)
    return int(min((-(-counts // settings.scale)).sum(), settings.batch)) * settings.steps


def measure_here(sample: ProbeClient, lanes: int) -> Costs:
    """Measure on this machine, with as many processes at once as steps will run at once: they share its caches."""
    with multiprocessing.get_context("spawn").Pool(lanes) as pool:
        return average(pool.map(measure, [sample] * lanes, chunksize=1))


def average(found: Sequence[Costs]) -> Costs:
    """Return the mean of several measurements."""
    return Costs(**{name: mean(getattr(costs, name) for costs in found) for name in Costs.__annotations__})
