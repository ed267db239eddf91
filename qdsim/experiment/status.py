"""Where a run is, in a file of its own: ``<run>/progress.json``, so that anybody who sees the storage can watch it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from qdsim.errors import StorageFailed
from qdsim.experiment.progress import Event, Left, Notice, Step
from qdsim.store import lock, run_directory, storage
from qdsim.store.run_directory import printable
from qdsim.store.storage import Remote, StoragePath

FILE = "progress.json"
EVERY_S = 1.0
EVERY_REMOTE_S = 10.0
NOTES = 5
SCORES = ("test_accuracy", "forget_accuracy", "retain_accuracy")
TEXTS = ("cell", "method", "request", "phase", "doing")
NUMBERS = (
    *("seed", "round_number", "rounds", "clients_done", "clients", "share_done", "round_s", "scored_round"),
    *("left_s", "left_low_s", "left_high_s"),
    *("tasks", "tasks_done", "actors_replaced", *SCORES),
)
PLACE = ("cell", "seed", "method", "request", "phase", "round_number", "rounds", "clients_done", "clients")


class Recorder:
    """Writes what a run says of itself, now and then."""

    def __init__(self, run_dir: StoragePath, tasks: int, is_owner: Callable[[], bool] = lambda: True):
        self._is_owner = is_owner
        self._path = run_dir / FILE
        self._every_s = EVERY_REMOTE_S if isinstance(run_dir, Remote) else EVERY_S
        self._written_s = 0.0
        self._served: set[int] = set()
        self._whose: tuple[Any, ...] = ()
        self._now: dict[str, Any] = {"tasks": tasks, "tasks_done": 0, "actors_replaced": 0, "notes": []}

    def take(self, event: Event) -> None:
        """Take an event in; write, if the last time was long enough ago."""
        now = self._now
        if isinstance(event, Notice):
            now["notes"] = [*now["notes"], event.text][-NOTES:]
            now["actors_replaced"] += event.actor_replaced
        elif isinstance(event, Step):
            now["doing"] = str(event)
        else:
            if not event.finished:  # which says that a request is served, and has no round of its own
                now.pop("doing", None)
                if event.whose != self._whose:  # the scores are of another phase
                    self._whose = event.whose
                    for name in (*SCORES, "round_s", "scored_round"):
                        now.pop(name, None)
                now |= {name: getattr(event, name) for name in PLACE}
            now |= {"share_done": event.share_done, **_left(event.left)}
            if event.finished and event.task >= 0:
                self._served.add(event.task)  # a driver that was replaced passes over them again
            now["tasks_done"] = len(self._served)
            if event.row is not None and not event.finished:
                now |= {name: event.row.get(name) for name in SCORES}
                now |= {"round_s": event.row["wall_s"], "scored_round": event.round_number}
        if time.monotonic() - self._written_s > self._every_s:
            self.write()

    def close(self) -> None:
        """Write the last of it."""
        self.write()

    def write(self) -> None:
        """Write what is known; a full disk is for the run itself to say."""
        self._written_s = time.monotonic()
        with suppress(StorageFailed):
            if self._is_owner():
                storage.write(self._path, json.dumps(self._now, indent=2).encode() + b"\n")


def _left(left: Left | None) -> dict[str, float | None]:
    """Return the time left as the file has it."""
    if left is None:
        return dict.fromkeys(("left_s", "left_low_s", "left_high_s"))
    return {"left_s": left.likely_s, "left_low_s": left.low_s, "left_high_s": left.high_s}


@dataclass(frozen=True)
class Status:
    """A run as its files show it."""

    run_id: str
    state: str
    """That of the manifest, or ``gone``: no live process owns the run, and it is not finished."""
    started_at: str
    error: str
    age_s: float | None
    """Since progress was last written; None where it never was."""
    progress: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    """Of the largest process of a client, in the newest round."""
    nodes: int = 0
    """That ran clients of that round."""


def state_of(run_dir: StoragePath, manifest: Mapping[str, Any]) -> str:
    """Return the state of a run: that of its manifest, or ``gone``."""
    state = str(manifest.get("state", ""))
    return "gone" if state == "running" and not lock.is_held(run_dir) else state


def is_running(run_dir: StoragePath) -> bool:
    """Tell whether a run goes on."""
    return state_of(run_dir, run_directory.read_manifest(run_dir)) == "running"


def read(run_dir: StoragePath) -> Status:
    """Read a run's manifest, progress, lock and newest round; whatever is missing is left out."""
    manifest = run_directory.read_manifest(run_dir)
    progress: dict[str, Any] = {}
    age_s = None
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        progress = _sound(found) if isinstance(found, dict) else {}
        age_s = max(0.0, time.time() - storage.modified_s(run_dir / FILE))
    state = state_of(run_dir, manifest)
    memory, nodes = _newest(run_dir)
    return Status(
        run_id=str(manifest.get("run_id") or run_dir.name),
        state=state,
        started_at=str(manifest.get("started_at", "")),
        error=str(manifest.get("error", "")),
        age_s=age_s,
        progress=progress,
        peak_memory_bytes=memory,
        nodes=nodes,
    )


def _sound(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is of the kind it should be; whoever wrote the rest, it is not shown."""
    sound: dict[str, Any] = {}
    for name, value in found.items():
        if name in TEXTS and isinstance(value, str):
            sound[name] = printable(value)
        elif name in NUMBERS and isinstance(value, int | float) and math.isfinite(value):
            sound[name] = value
        elif name == "notes" and isinstance(value, list):
            sound[name] = [printable(str(note)) for note in value]
    return sound


def _newest(run_dir: StoragePath) -> tuple[int | None, int]:
    """Return the largest memory of a client's process in the newest round, and how many nodes ran clients."""
    if isinstance(run_dir, Remote):  # there reading a file is a request of its own
        return None, 0
    parts = [path for path in run_directory.part_files(run_dir, "clients") if path.stem != run_directory.SCHEMA_PART]
    if not parts:
        return None, 0
    try:
        rows = (
            run_directory.read_part(max(parts, key=storage.modified_s), "clients")
            .select(["peak_memory_bytes", "node_id"])
            .to_pylist()
        )
    except (OSError, ValueError, KeyError, pa.ArrowException):  # analysis and resume say so
        return None, 0
    memory = [row["peak_memory_bytes"] for row in rows if row["peak_memory_bytes"]]
    return (max(memory) if memory else None), len({row["node_id"] for row in rows})
