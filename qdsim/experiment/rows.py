"""Rows of the tables, from what rounds, phases and partitions were. Values in, dicts out."""

import numpy as np

from qdsim.algorithms.phase import Phase
from qdsim.experiment.plan import PhaseKey, Task
from qdsim.experiment.progress import Row
from qdsim.federation.measures import Counts
from qdsim.federation.rounds import Round
from qdsim.store import tables

CONVERGED_WITHIN = 0.01
SUMMED = tuple(column.name for column in tables.COLUMNS["stages"] if column.summed)
"""Clocks and counts that a phase's row has the sums of."""
SCORES = tuple(column.name for column in tables.SCORES)
"""Accuracies that a phase's row takes from its last round."""
GIVEN = {"reused", *(column.name for column in tables.KEYS)}
CLIENT_COLUMNS = tuple(name for name in tables.names("clients") if name not in GIVEN)
"""What a client's row takes from its update, whose fields have the same names."""
Scores = dict[str, float | None]


def partition_rows(training: Task) -> list[Row]:
    """Return a row for each client and class."""
    split, point = training.federation.partition, training.point
    counts = split.counts
    synthetic = split.synthetic_counts(point.hyper.synthetic.scale) if point.distils else 0 * counts
    named = {**training.key("train").columns(), "round": 0}
    return [
        {**named, "client_id": i, "class": c, "num_samples": int(n), "num_synthetic": int(synthetic[i, c])}
        for (i, c), n in np.ndenumerate(counts)
    ]


def costs(result: Round) -> Row:
    """Return a round's clocks and counts; a round may have no participants (FedEraser's stored one)."""
    updates = result.updates
    return {
        "start_loss": start_loss(result),
        "wall_s": result.wall_s,
        "client_compute_s": sum(u.compute_s for u in updates),
        "critical_path_s": max((u.compute_s for u in updates), default=0.0),
        "aggregation_s": result.aggregation_s,
        "wait_s": result.wait_s,
        "busy_s": result.busy_s,
        "samples": sum(u.samples for u in updates),
        "gradients": sum(u.gradients for u in updates),
        "bytes_up": sum(u.bytes_up for u in updates),
        "bytes_down": result.bytes_down,
        "participants_expected": result.expected,
        "participants_received": len(updates),
    }


def start_loss(result: Round) -> float | None:
    """Return the mean loss of the participants' first mini-batches, weighted as their updates are."""
    known = [(u.num_samples, u.first_loss) for u in result.updates if u.first_loss is not None]
    total = sum(size for size, _ in known)
    return sum(size * loss for size, loss in known) / total if total else None


def client_rows(key: PhaseKey, result: Round) -> list[Row]:
    """Return a row for each participant."""
    named = {**key.columns(), "round": result.number, "reused": False}
    return [{**named, **{name: getattr(update, name) for name in CLIENT_COLUMNS}} for update in result.updates]


def stage_row(key: PhaseKey, rounds: list[Row], phase: Phase, before: Scores, storage: tuple[int, int]) -> Row:
    """Sum a phase's rounds up and say what ended it; ``before`` are the scores that it began with."""
    last = rounds[-1]
    score = "retain_accuracy" if last.get("retain_accuracy") is not None else "test_accuracy"
    converged = next(r["round"] for r in rounds if r[score] >= last[score] - CONVERGED_WITHIN)
    stop_reason = "rounds"
    if phase.ends_by is not None:
        early = phase.ends_by.reached(scores_of(phase, rounds, before))
        stop_reason = f"converged: {phase.ends_by}" if early else f"rounds, not converged: {phase.ends_by}"
    return {
        **key.columns(),
        "round": last["round"],
        "stop_reason": stop_reason,
        "rounds_run": len(rounds),
        "max_rounds": phase.stage.rounds,
        "converged_round": converged,
        "forget_accuracy_start": before.get("forget_accuracy"),
        "retain_accuracy_start": before.get("retain_accuracy"),
        **{name: sum(r[name] for r in rounds) for name in SUMMED},
        **{name: last.get(name) for name in SCORES},
        "data_size": last["data_size"],
        "storage_bytes": storage[0],
        "storage_bytes_nominal": storage[1],
        "reused": False,
    }


def class_rows(key: PhaseKey, result: Round, counts: Counts) -> list[Row]:
    """Return a row for each class."""
    named = {**key.columns(), "round": result.number, "reused": False}
    return [{**named, "class": c, "accuracy": counts.accuracy({c})} for c in range(len(counts.total))]


def scores_of(phase: Phase, rounds: list[Row], before: Scores) -> list[float | None]:
    """Return what the phase's rule looks at: the score before it, unless it begins with another model, and since."""
    assert phase.ends_by is not None
    first = before.get(phase.ends_by.score) if phase.start == "current" else None
    return [first, *(row[phase.ends_by.score] for row in rounds)]
