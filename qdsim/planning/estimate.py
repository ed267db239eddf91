"""How long a plan takes and what it needs, from a few measured costs. Values in, values out."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np

from qdsim.algorithms import distillation
from qdsim.algorithms.phase import Phase
from qdsim.experiment.plan import MATCHED_IMAGE_COST, FederationPlan, Plan, SweepPoint, Task, training_task
from qdsim.models.compute import CPU_MICRO_BATCH, WHOLE_BATCH
from qdsim.planning.layout import Layout, Node, lay_out

PROCESS_BYTES = 350 * 2**20
"""Private memory of a process that has imported torch and Ray: 307 MB were measured before any tensor."""
ACTIVATION_COPIES = 13
"""Of a micro-batch's activations that a step holds at its peak: 9 to 13 were measured, for W = 32 and 128."""
MODEL_COPIES = 6
"""The global model, θ_i, a gradient, the delta, and room for two more."""
CUDA_BYTES = 400 * 2**20
"""What a process takes of a GPU before any tensor."""
ROUND_S = 0.2
"""Of a round beside steps and evaluation: selection, averaging, rows, the commit."""
START_S = 20.0
"""From the command to the first round: Ray, actors, data."""
PART_BYTES = 16_000
"""Of a Parquet part with a round's rows, nearly all of it its schema."""
TABLES_A_ROUND = 3
CLIENT_ROW_BYTES = 100
VALUES_A_PIXEL = 2
"""A synthetic image is stored with its velocity."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Costs:
    """Seconds that a core, or a GPU, takes for one sample."""

    gradient_s: float
    """Of a plain step."""
    learning_s: float
    """Of a training step, whose gradients are formed class by class."""
    matching_s: float
    """A synthetic image in a matching step."""
    evaluation_s: float

    def scaled(self, factor: float) -> "Costs":
        """Return the costs of a network with so many times the operations."""
        return Costs(*(factor * cost for cost in astuple(self)))


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


def actor_bytes(plan: Plan, packed: int) -> int:
    """Return the memory that an actor with so many clients is expected to take; images are shared, and not in it."""
    return PROCESS_BYTES + _working_bytes(plan, packed, CPU_MICRO_BATCH)


def gpu_bytes(plan: Plan, packed: int) -> int:
    """Return the GPU memory that an actor is expected to take: the whole batch at once, unless the job says less."""
    return CUDA_BYTES + _working_bytes(plan, packed, WHOLE_BATCH)


def _working_bytes(plan: Plan, packed: int, micro_batch: int) -> int:
    """Return what steps need, and the synthetic sets that an actor holds, in the largest point."""
    most = 0
    for point, federation in plan.federations():
        hyper, wanted = point.hyper, point.job.cluster.micro_batch
        largest = max(stage.batch_size for stage in (hyper.train, hyper.unlearn, hyper.recover, hyper.relearn))
        batch = min(wanted if isinstance(wanted, int) else micro_batch, largest)
        step = ACTIVATION_COPIES * point.model.activation_bytes * batch + MODEL_COPIES * model_bytes(point)
        share = min(1.0, packed / len(federation.labels))
        most = max(most, step + int(share * synthetic_bytes(point, federation)))
    return most


def layout_of(plan: Plan, nodes: Sequence[Node], gpus: int | None) -> Layout:
    """Lay a plan's clients out on nodes; see :func:`qdsim.planning.layout.lay_out`."""
    return lay_out(plan.max_clients, plan.job.cluster, nodes, partial(actor_bytes, plan), gpus, loads(plan))


def loads(plan: Plan) -> list[float]:
    """Return how much each client has to do in training, all federations together: one set of actors serves all."""
    alike = Costs(1.0, 1.0, MATCHED_IMAGE_COST, 0.0)
    total = np.zeros(plan.max_clients)
    for training in (training_task(point, at) for point, at in plan.federations()):
        for phase in training.phases():
            seconds = phase.stage.rounds * client_seconds(training, phase, alike)
            total[: len(seconds)] += seconds
    return [float(value) for value in total]


def client_seconds(task: Task, phase: Phase, costs: Costs) -> np.ndarray:
    """Return how long each client's step of a round takes."""
    point, at = task.point, task.federation
    stage, sizes = phase.stage, task.sizes(phase)
    batch = np.minimum(sizes, stage.batch_size).astype(float)
    synthetic = at.partition.synthetic_counts(point.hyper.synthetic.scale).sum(1)
    if phase.name == "finetune":
        real = np.minimum(at.partition.counts, stage.batch_size).sum(1)
        matched = costs.learning_s * real + costs.matching_s * synthetic
        descents = (distillation.FINETUNE_STEPS - 1) * distillation.FINETUNE_EPOCHS
        return np.asarray(distillation.FINETUNE_STEPS * matched + descents * costs.gradient_s * synthetic)
    if phase.learns:
        settings = point.hyper.synthetic
        matched = np.minimum(synthetic, settings.batch) * settings.steps if settings.matching else 0 * synthetic
        return np.asarray(stage.steps * (costs.learning_s * batch + costs.matching_s * matched))
    if phase.reads_once:
        return np.asarray(costs.evaluation_s * sizes)
    return np.asarray(stage.steps * costs.gradient_s * batch)


def phase_times(plan: Plan, layout: Layout, lanes: int, costs: Costs) -> list[PhaseTime]:
    """Return every phase of the plan with its expected duration, no training found again.

    ``costs`` are those of the first cell's network.
    """
    tasks = [*(training_task(point, at) for point, at in plan.federations()), *plan.tasks()]
    return [_phase_time(plan, task, phase, layout, lanes, costs) for task in tasks for phase in task.phases()]


def _phase_time(plan: Plan, task: Task, phase: Phase, layout: Layout, lanes: int, costs: Costs) -> PhaseTime:
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
    return PhaseTime(*task.key(phase.name), phase.stage.rounds, waves, wall_s)


def total_s(times: Iterable[PhaseTime]) -> float:
    """Return the whole duration, start-up included."""
    return START_S + sum(time.wall_s for time in times)


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
