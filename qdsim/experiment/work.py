"""How much there is to do in a phase: what each client works on in a round, and what that costs. Values in and out."""

from dataclasses import astuple, dataclass

import numpy as np

from qdsim.algorithms import distillation
from qdsim.algorithms.phase import Phase
from qdsim.experiment.plan import Task
from qdsim.experiment.progress import Load

EVALUATION_COST = 1 / 3
"""A forward pass against a gradient, which is three."""


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


PLAIN = Costs(1.0, 1.0, 0.0, EVALUATION_COST)
MATCHED = Costs(0.0, 0.0, 1.0, 0.0)


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


def load_of(task: Task, phase: Phase) -> Load:
    """Return what a phase has to do, in units that its own clock turns into seconds."""
    share, operations = phase.stage.participation, float(task.point.model.forward_flops)
    plain = client_seconds(task, phase, PLAIN)
    held = float(task.federation.partition.counts.sum())
    return Load(
        kind=phase.name,
        rounds=phase.stage.rounds,
        plain=share * float(plain.sum()) * operations,
        matched=share * float(client_seconds(task, phase, MATCHED).sum()) * operations,
        clients=max(1, round(share * int((plain > 0).sum()))),
        # at the end of a request's phase every client is evaluated on its own data as well
        after=EVALUATION_COST * held * operations if task.request.label else 0.0,
        saves=phase.learns,
        may_end=phase.ends_by is not None,
    )
