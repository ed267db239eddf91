"""How long a plan takes and what it needs, from a few measured costs. Values in, values out."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from qdsim.algorithms.phase import Phase
from qdsim.errors import CannotPlace
from qdsim.experiment import sharing
from qdsim.experiment.plan import FederationPlan, Plan, SweepPoint, Task, training_task
from qdsim.experiment.progress import MATCHED_COST
from qdsim.experiment.sections import Cluster
from qdsim.experiment.work import Costs, client_seconds
from qdsim.federation.measures import GPU_BATCH
from qdsim.models.device import CONTEXT_BYTES
from qdsim.models.numerics import CPU_MICRO_BATCH, GPU_MICRO_BATCH
from qdsim.planning import units
from qdsim.planning.layout import GpuMemory, Layout, Node, lay_out
from qdsim.planning.measured import Measured

PROCESS_BYTES = 350 * 2**20
"""Private memory of a process that has imported torch and Ray: 307 MB were measured before any tensor."""
ACTIVATION_COPIES = 13
"""Of a micro-batch's activations that a step holds at its peak: 9 to 13 were measured, for W = 32 and 128."""
GRAPH_COPIES = 2
"""With CUDA graphs: each keeps the memory that it was captured with, beside that of the steps before."""
EVALUATION_COPIES = 2
"""Of the activations of a batch that an evaluation holds: a convolution and what comes out of its block."""
MODEL_COPIES = 6
"""The global model, θ_i, a gradient, the delta, and room for two more."""
ROUND_S = 0.05
"""Of a round beside steps and evaluation: selection, averaging, rows, the commit."""
START_S = 10.0
"""From the command to the first round: Ray, actors, data. With warm file caches 8 s were measured."""
PART_BYTES = 16_000
"""Of a Parquet part with a round's rows, nearly all of it its schema."""
TABLES_A_ROUND = 3
CLIENT_ROW_BYTES = 100
VALUES_A_PIXEL = 2
"""A synthetic image is stored with its velocity."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Within:
    """How far off an estimate may be: factors from the least to the most."""

    costs: tuple[float, float]
    """On what samples cost."""
    beside: tuple[float, float] = (1 / 1.3, 1.3)
    """On what rounds and the start cost beside them."""


MEASURED = Within((1 / 1.3, 1.3))
"""Where a probe has measured: runs on cores were within 30 % of their plans. Of GPUs no such run is known yet."""


@dataclass(frozen=True)
class PhaseTime:
    """What a phase is expected to take."""

    seed: int
    cell: str
    method: str
    request: str
    phase: str
    rounds: int
    waves: int
    """How often a lane is used in a round."""
    wall_s: float
    low_s: float = 0.0
    """At the least, with costs that are lower by what they are known to."""
    high_s: float = 0.0


def actor_bytes(plan: Plan, packed: int) -> int:
    """Return the memory that an actor with so many clients is expected to take; images are shared, and not in it."""
    return PROCESS_BYTES + _working_bytes(plan, packed, CPU_MICRO_BATCH)


def gpu_bytes(plan: Plan, packed: int, measured: Measured | None = None) -> int:
    """Return the GPU memory that an actor is expected to take: 256 samples at once, unless the job says less.

    ``measured``: where a GPU took more than is expected here, that counts; less may be of that GPU alone.
    """
    context, share = CONTEXT_BYTES, 1.0
    if measured is not None:
        context, share = max(context, measured.context_bytes), max(share, measured.peak_share)
    working = _working_bytes(plan, packed, GPU_MICRO_BATCH, GPU_BATCH)
    return context + int(share * working) + _shard_bytes(plan, packed)


def _shard_bytes(plan: Plan, packed: int) -> int:
    """Return what the shards of so many clients take on a GPU, where they stay."""
    most = 0.0
    for point, federation in plan.federations():
        images = sum(len(labels) for labels in federation.labels)
        share = min(1.0, packed / len(federation.labels))
        most = max(most, share * images * point.model.channels * point.model.size**2)
    return int(most)


def _working_bytes(plan: Plan, packed: int, micro_batch: int, evaluated: int = 0) -> int:
    """Return what steps need, and the synthetic sets that an actor holds, in the largest point.

    ``evaluated``: images of an evaluation's batch, where the micro-batch is not smaller than usual.
    """
    most = 0
    for point, federation in plan.federations():
        wanted = point.job.cluster.micro_batch
        at_once = wanted if isinstance(wanted, int) else micro_batch
        copies = ACTIVATION_COPIES * min(at_once, largest_batch(point, federation))
        if evaluated and point.job.cluster.cuda_graphs != "off":
            copies *= GRAPH_COPIES
        if at_once >= micro_batch:
            copies = max(copies, EVALUATION_COPIES * evaluated)
        step = copies * point.model.activation_bytes + MODEL_COPIES * model_bytes(point)
        share = min(1.0, packed / len(federation.labels))
        most = max(most, step + int(share * synthetic_bytes(point, federation)))
    return most


def largest_batch(point: SweepPoint, federation: FederationPlan) -> int:
    """Return the most samples that a step of any client has at once, before it is cut into micro-batches."""
    hyper = point.hyper
    found = [stage.batch_size for stage in (hyper.train, hyper.unlearn, hyper.recover, hyper.relearn)]
    if point.distils:
        synthetic = federation.partition.synthetic_counts(hyper.synthetic.scale).sum(1)
        found.append(min(int(synthetic.max()), hyper.synthetic.batch))
        if hyper.synthetic.finetune:  # a batch of each of a client's classes, and all of its synthetic images
            real = np.minimum(federation.partition.counts, hyper.train.batch_size).sum(1)
            found += [int(real.max()), int(synthetic.max())]
    return max(found)


def layout_of(
    plan: Plan,
    nodes: Sequence[Node],
    gpus: int | None,
    gpu_memory: float | None = None,
    measured: Measured | None = None,
    wanted: Cluster | None = None,
) -> Layout:
    """Lay a plan's clients out on nodes; see :func:`qdsim.planning.layout.lay_out`. A run and a plan both do.

    ``gpu_memory``: of the smallest GPU, None where nobody tells. ``wanted``: other settings than the job's.
    """
    memory = GpuMemory(gpu_memory, partial(gpu_bytes, plan, measured=measured)) if gpu_memory else None
    wanted = wanted or plan.job.cluster
    return lay_out(plan.max_clients, wanted, nodes, partial(actor_bytes, plan), gpus, loads(plan), memory)


@dataclass(frozen=True)
class Packing:
    """One way of packing clients into actors on GPUs, and what it costs."""

    name: str
    clients: int
    """Of the actor that has most of them, in turn."""
    on_a_gpu: int
    """Actors, each a process."""
    context_bytes: int
    """Of a GPU's memory, what CUDA takes for these processes."""
    memory_bytes: int
    """All that they take."""
    cores: float
    """What they ask of the host of a GPU, to launch kernels from."""


def packings(
    plan: Plan,
    layout: Layout,
    nodes: Sequence[Node],
    gpus: int | None,
    gpu_memory: float | None,
    measured: Measured | None = None,
) -> list[Packing]:
    """Return both ways of packing a job on GPUs that fit, an actor for each client and few packed ones, and its own."""
    shared = replace(plan.job.cluster, gpus_per_client="auto")
    ways: dict[str, Layout] = {}
    with suppress(CannotPlace):
        each = layout_of(plan, nodes, gpus, gpu_memory, measured, replace(shared, clients_per_actor=1))
        if len(each.clients) == plan.max_clients:  # else memory has them packed
            ways["1"] = each
    with suppress(CannotPlace):
        few = layout_of(plan, nodes, gpus, gpu_memory, measured, replace(shared, clients_per_actor="auto"))
        ways['"auto"'] = few
    named = {way: name for name, way in reversed(ways.items())}
    ways = {f"{named[layout]} (this job)" if layout in named else "this job": layout} | {
        name: way for name, way in ways.items() if way != layout
    }
    context = max(CONTEXT_BYTES, measured.context_bytes if measured else 0)
    found = []
    for name, way in ways.items():
        packed = max(len(group) for group in way.clients)
        on_one = way.on_one_gpu
        memory = on_one * gpu_bytes(plan, packed, measured)
        found.append(Packing(name, packed, on_one, on_one * context, memory, round(on_one * way.cpus, 2)))
    return found


def packing_note(plan: Plan, layout: Layout, gpu_memory: float | None) -> str | None:
    """Say that clients were packed because of the GPUs' memory; None where they were not."""
    packed = max(len(group) for group in layout.clients)
    wanted = plan.job.cluster.clients_per_actor
    if not (layout.gpus and gpu_memory and packed > 1) or (isinstance(wanted, int) and wanted > 1):
        return None
    each, of_gpu = gpu_bytes(plan, packed), units.size(gpu_memory)
    holds = int(gpu_memory // each)
    if holds > layout.on_one_gpu:
        return None
    return (
        f"{packed} clients share an actor (auto): a GPU of {of_gpu} holds {holds} actors of {units.size(each)}; "
        "the results are the same bits"
    )


def loads(plan: Plan) -> list[float]:
    """Return how much each client has to do in training, all federations together: one set of actors serves all."""
    alike = Costs(1.0, 1.0, MATCHED_COST, 0.0)
    total = np.zeros(plan.max_clients)
    for training in (training_task(point, at) for point, at in plan.federations()):
        for phase in training.phases():
            seconds = phase.stage.rounds * client_seconds(training, phase, alike)
            total[: len(seconds)] += seconds
    return [float(value) for value in total]


def phase_times(plan: Plan, layout: Layout, lanes: int, costs: Costs, within: Within = MEASURED) -> list[PhaseTime]:
    """Return every phase that the plan computes with its expected duration: what cells share counts once.

    ``costs`` are those of the first cell's network. A training that lies in ``--out`` from before is not left out.
    """
    return [_phase_time(plan, task, phase, layout, lanes, costs, within) for task, phase in sharing.computed(plan)]


def _phase_time(
    plan: Plan, task: Task, phase: Phase, layout: Layout, lanes: int, costs: Costs, within: Within
) -> PhaseTime:
    point, at = task.point, task.federation
    costs = costs.scaled(point.model.forward_flops / plan.points[0].model.forward_flops)
    share = phase.stage.participation
    seconds = client_seconds(task, phase, costs)
    # a client stays with its actor: a round is as long as the busiest one, or as all of them shared out over the lanes
    actors = [share * seconds[[i for i in group if i < len(seconds)]].sum() for group in layout.clients]
    steps_s = max(share * seconds.sum() / lanes, seconds.max(), *actors)
    side_by_side = min(lanes, len(layout.clients))
    tested = len(plan.test_labels)
    a_round_s = steps_s + costs.evaluation_s * tested / side_by_side + ROUND_S
    # at the end of a request's phase every client is evaluated on its own data as well
    own_s = costs.evaluation_s * int(at.partition.counts.sum()) / side_by_side if task.request.label else 0.0
    takes_part = max(1, round((seconds > 0).sum() * share))
    wall_s = phase.stage.rounds * a_round_s + own_s
    waves = -(-takes_part // side_by_side)
    beside_s = phase.stage.rounds * ROUND_S
    low_s, high_s = ((wall_s - beside_s) * f + beside_s * b for f, b in zip(within.costs, within.beside, strict=True))
    return PhaseTime(*task.key(phase.name), phase.stage.rounds, waves, wall_s, low_s, high_s)


def total_s(times: Iterable[PhaseTime]) -> float:
    """Return the whole duration, start-up included."""
    return START_S + sum(time.wall_s for time in times)


def range_s(times: Iterable[PhaseTime], within: Within) -> tuple[float, float]:
    """Return the whole duration at the least and at the most."""
    low, high = within.beside
    times = list(times)
    return START_S * low + sum(time.low_s for time in times), START_S * high + sum(time.high_s for time in times)


def storage_bytes(plan: Plan) -> int:
    """Return about how many bytes a run writes: tables, models, trained states, and a checkpoint at its largest."""
    tables = models = states = checkpoint = 0
    for point, federation in plan.federations():
        model, sets = model_bytes(point), synthetic_bytes(point, federation)
        first = model * point.job.partition.clients
        states += model + first + sets
        # a file and the one that is about to replace it; of synthetic sets the last three, and the one being written
        checkpoint = max(checkpoint, 2 * 2 * model + first + 4 * sets)
        for phase in point.training():
            tables += _rows_bytes(phase.stage.rounds, point)
    for task in plan.tasks():
        models += model_bytes(task.point)
        tables += sum(_rows_bytes(phase.stage.rounds, task.point) for phase in task.phases())
    return tables + models + states + checkpoint


def _rows_bytes(rounds: int, point: SweepPoint) -> int:
    return rounds * (TABLES_A_ROUND * PART_BYTES + point.job.partition.clients * CLIENT_ROW_BYTES)


def model_bytes(point: SweepPoint) -> int:
    """Return the size of the model's parameters."""
    return point.model.num_params * FLOAT_BYTES


def synthetic_bytes(point: SweepPoint, federation: FederationPlan) -> int:
    """Return what the synthetic sets of all clients take on disk; 0 where none are distilled."""
    if not point.distils:
        return 0
    images = int(federation.partition.synthetic_counts(point.hyper.synthetic.scale).sum())
    return images * point.model.channels * point.model.size**2 * FLOAT_BYTES * VALUES_A_PIXEL
