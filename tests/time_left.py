"""Compare the time left that a run told after each round with the time that it then took.

``python -m tests.time_left finetune clients`` runs a job with fine-tuning and one of 1,000 clients on Ray (``--engine
inline``: in this process), the second on MNIST under ``$QDSIM_DATA_ROOT``; a job's name or file runs that one, with
``--set`` and ``--profile`` as ``qdsim run`` takes them. Printed is, from the tenth round on, what was told (at the
least, likely, at the most) beside what it was, with the factor between likely and true; at the end the worst one. Exit
1 where that is more than 2.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdsim.api import launch
from qdsim.api.display import place
from qdsim.experiment import config, job_files
from qdsim.experiment.config import Job
from qdsim.experiment.progress import Event, Left, Progress

FIRST_ROUND = 10
MOST = 2.0
"""The factor by which an estimate may be off."""
SHORT_S = 2.0
"""With less than this left no factor is counted: it is the end of a run, and one commit more or less decides."""
SMALL: dict[str, Any] = {
    "seeds": [0],
    "model": {"width": 16, "depth": 2},
    "train": {"rounds": 20, "steps": 10, "batch_size": 32, "lr": 0.1},
    "unlearn": {"steps": 10, "lr": 0.1},
    "recover": {"rounds": 2, "steps": 5, "lr": 0.1},
    "relearn": {"rounds": 2, "steps": 5, "lr": 0.1},
    "synthetic": {"scale": 10},
    "membership": ["loss_threshold"],
}
JOBS: dict[str, dict[str, Any]] = {
    "finetune": SMALL | {"name": "finetune", "synthetic": {"scale": 10, "finetune": 10}},
    "clients": SMALL
    | {
        "name": "clients",
        "data": {"dataset": "mnist"},
        "model": {"width": 8, "depth": 2},
        "partition": {"kind": "iid", "clients": 1000},
        "train": SMALL["train"] | {"rounds": 12, "steps": 2},
        "unlearn": {"steps": 2, "lr": 0.1},
        "recover": {"rounds": 2, "steps": 2, "lr": 0.1},
        "relearn": {"rounds": 1, "steps": 2, "lr": 0.1},
        "cluster": {"clients_per_actor": 500},
    },
}


@dataclass(frozen=True)
class Told:
    """What a run said at the end of a round."""

    at_s: float
    where: str
    left: Left | None

    def factor(self, ended_s: float) -> float | None:
        """Return by how much the likely time was off; None where nothing was told, or hardly anything was left."""
        true_s = ended_s - self.at_s
        if self.left is None or true_s < SHORT_S:
            return None
        likely_s = max(self.left.likely_s, 1e-9)
        return max(likely_s / true_s, true_s / likely_s)


def told_by(job: Job, out: Path, engine: str) -> tuple[list[Told], float]:
    """Run a job; return what it told after each round, and when its last request was served."""
    told: list[Told] = []
    heard_s = [0.0]

    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            heard_s.append(time.monotonic())
            if event.row is not None and not event.finished:
                told.append(Told(heard_s[-1], place(event), event.left))

    origin: dict[str, Any] = {"job": job.name, "profile": None, "set": []}
    launch.run(job, out, engine=engine, address=None, origin=origin, begin=lambda *_: None, emit=listen)
    return told, heard_s[-1]


def worst(told: Sequence[Told], ended_s: float) -> float:
    """Return the largest factor from the tenth round on; a round that told nothing is off by any."""
    found = 1.0
    for each in told[FIRST_ROUND - 1 :]:
        if each.left is None and ended_s - each.at_s >= SHORT_S:
            return float("inf")
        found = max(found, each.factor(ended_s) or 1.0)
    return found


def show(told: Sequence[Told], ended_s: float) -> None:
    """Print a line for each round from the tenth on."""
    print(f"{'round':>5}  {'low':>7}  {'likely':>7}  {'high':>7}  {'true':>7}  factor")
    for number, each in enumerate(told[FIRST_ROUND - 1 :], FIRST_ROUND):
        left, factor = each.left, each.factor(ended_s)
        ends = (left.low_s, left.likely_s, left.high_s) if left else ()
        said = "  ".join(f"{end:7.1f}" for end in ends) or f"{'nothing told':>25}"
        off = f"{factor:6.2f}" if factor else "     -"
        print(f"{number:5}  {said}  {ended_s - each.at_s:7.1f}  {off}  {each.where}", flush=True)


def main() -> None:
    """Run each job, print its table and its worst factor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="+", help=f"{', '.join(JOBS)}, or a job's name or file")
    parser.add_argument("--engine", choices=("ray", "inline"), default="ray")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile")
    given = parser.parse_args()
    factors = {}
    for name in given.jobs:
        if name in JOBS:
            job = config.build(JOBS[name], profile=given.profile, overrides=given.set)
        else:
            job = config.load(job_files.find(Path(name)), profile=given.profile, overrides=given.set)
        with tempfile.TemporaryDirectory() as folder:
            told, ended_s = told_by(job, Path(folder), given.engine)
        factors[name] = worst(told, ended_s)
        print(f"{name}: {len(told)} rounds")
        show(told, ended_s)
    for name, factor in factors.items():
        print(f"{name}: the time left was within a factor of {factor:.2f} from round {FIRST_ROUND} on")
    sys.exit(any(factor > MOST for factor in factors.values()))


if __name__ == "__main__":
    main()
