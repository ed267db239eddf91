"""Named sets of overrides. ``--profile laptop`` makes any job run in minutes on two cores.

A profile changes rounds, steps, batch, width, learning rates, the number of seeds, packing and the length of
sweeps; never the data set, the number of clients, α, methods or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qdsim.experiment.config import Job

LAPTOP_SWEEPS: dict[str, list[Any]] = {
    "synthetic.finetune": [0, 1, 2, 4],
    "synthetic.scale": [10, 100, 1000],
    "partition.alpha": [0.1, 10.0],
}
SMOKE_SWEEPS: dict[str, list[Any]] = {"synthetic.finetune": [0, 1]}


def laptop(job: Job) -> dict[str, Any]:
    """Two cores, minutes: MNIST reaches 92 % and CIFAR-10 50 % before unlearning."""
    gray = job.data.dataset in ("digits", "mnist", "fashion_mnist")
    # equal clients learn faster, and matching every class at every client in each step takes longer
    rounds = 20 if gray else 25 if job.partition.kind == "iid" else 40
    return {
        "seeds": list(job.seeds[:1]),
        "model.width": 16 if gray else 32,
        "train.rounds": rounds,
        "train.steps": 20,
        "train.batch_size": 64,
        "train.lr": 0.05,
        "unlearn.rounds": min(job.unlearn.rounds, 2),
        "unlearn.steps": 20,
        "recover.rounds": min(job.recover.rounds, 6),
        "recover.steps": 5,
        "recover.lr": 0.05,
        "relearn.rounds": 4 if job.relearn.rounds else 0,
        "relearn.steps": 10,
        "relearn.lr": 0.1,
        # beside batches of 64 all of a client's would take three quarters of the time; in the paper it is half
        "synthetic.batch": 32,
        "synthetic.finetune": min(job.synthetic.finetune, 10),
        "fump.recover_rounds": 2
        * job.settings_of("fump").recover_rounds,  # of 20 steps each: the paper's have 50, and forgetting is slow
        "federaser.interval": 1,  # every other of so few rounds leaves the replay half-way: R-Set 92 % on MNIST, not 95
        "sweep": _shorter(job, LAPTOP_SWEEPS),
        **_packing(job),
    }


def smoke(job: Job) -> dict[str, Any]:
    """About a minute, to see that a job runs; its numbers mean nothing."""
    return {
        "seeds": list(job.seeds[:1]),
        "model.width": 4,
        "train.rounds": 2,
        "train.steps": 2,
        "train.batch_size": 16,
        "unlearn.rounds": 1,
        "unlearn.steps": 2,
        "unlearn.batch_size": 16,
        "recover.rounds": min(job.recover.rounds, 1),
        "recover.steps": 2,
        "recover.batch_size": 16,
        "relearn.rounds": min(job.relearn.rounds, 1),
        "relearn.steps": 2,
        "relearn.batch_size": 16,
        "synthetic.batch": 32,
        "synthetic.finetune": min(job.synthetic.finetune, 1),
        "sweep": {key: values[-2:] for key, values in _shorter(job, SMOKE_SWEEPS).items()},
        "sga.unlearn_rounds": 1,
        "sga.recover_rounds": min(job.settings_of("sga").recover_rounds, 1),
        "federaser.recover_rounds": min(job.settings_of("federaser").recover_rounds, 1),
        "fump.recover_rounds": min(job.settings_of("fump").recover_rounds, 1),
        "s2u.rounds": 1,
        **_packing(job),
    }


def _shorter(job: Job, instead: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Put a short list in the place of a long one; a list that is no longer stays what it is."""
    shorter = {key: values for key, values in instead.items() if len(values) < len(job.sweep.get(key, []))}
    return {key: shorter.get(key, values) for key, values in job.sweep.items()}


def _packing(job: Job) -> dict[str, Any]:
    """Two actors, one for each core."""
    return {"cluster.clients_per_actor": -(-job.partition.clients // 2)}


PROFILES: dict[str, Callable[[Job], dict[str, Any]]] = {"laptop": laptop, "smoke": smoke}
