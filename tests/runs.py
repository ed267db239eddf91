"""Small real runs that several tests look at."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd

from qdsim.api import launch
from qdsim.experiment import config
from qdsim.experiment.progress import Event, Notice, Step
from qdsim.federation.chaos import Fault
from qdsim.store.storage import StoragePath

Place = TypeVar("Place", bound=StoragePath)

TINY: dict[str, Any] = {
    "name": "tiny",
    "seeds": [0],
    "model": {"width": 4, "depth": 2},
    "train": {"rounds": 3, "steps": 3, "batch_size": 16, "lr": 0.1},
    "unlearn": {"steps": 3, "lr": 0.1},
    "recover": {"rounds": 2, "steps": 2, "lr": 0.1},
    "relearn": {"rounds": 1, "steps": 2, "lr": 0.1},
    "synthetic": {"scale": 10},
    "cluster": {"cpu_fallback": True},  # the GPUs that the tests' cluster has are logical ones
}


def granted_gpus(events: Sequence[object]) -> dict[int, str]:
    """Return the logical GPU of each client that a run's notes name; the CPU computes in its place."""
    texts = [event.text for event in events if isinstance(event, Notice)]
    found = [re.match(r"clients (.+) run on the CPU instead of GPU (\d+) of node", text) for text in texts]
    return {int(client): said[2] for said in found if said for client in said[1].split(", ") if client.isdigit()}


def ignore(*_: Any) -> None:
    """Take whatever a run says and do nothing."""


def run(
    out: Place,
    *,
    engine: str = "inline",
    address: str | None = None,
    emit: Callable[[Event], None] = ignore,
    resume: bool | StoragePath = False,
    chaos: Sequence[str] = (),
    **changes: Any,
) -> Place:
    """Run the tiny job, changed section by section, and return its directory; ``emit`` hears of rounds and notes."""
    values = {**TINY, **{k: {**TINY[k], **v} if isinstance(TINY.get(k), dict) else v for k, v in changes.items()}}
    job = config.validate(values)
    origin: dict[str, Any] = {"job": "tiny", "profile": None, "set": []}
    made = launch.run(
        job,
        out,
        engine=engine,
        address=address,
        origin=origin,
        begin=ignore,
        emit=lambda event: None if isinstance(event, Step) else emit(event),
        resume=resume,
        faults=[Fault.parse(text) for text in chaos],
    )
    return cast(Place, made)


def table(run_dir: Path, name: str) -> pd.DataFrame:
    """Read a table of a run."""
    return pd.read_parquet(run_dir / "tables" / name)
