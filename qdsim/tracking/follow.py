"""Trackers beside a run: they follow its tables in a thread of their own, and what fails there never stops the run."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from qdsim.errors import BadInput, QdsimError
from qdsim.experiment.progress import Event, Progress
from qdsim.store import run_directory
from qdsim.store.storage import StoragePath
from qdsim.tracking.series import Reader
from qdsim.tracking.trackers import TRACKERS, Target, Tracker

EVERY_S = 1.0
SHARE_OF_TIME = 20
"""Listing the parts of a long run takes time: it is done no more often than every so many times that."""
CLOSE_S = 60.0
"""How long a tracker may take to send the last of it; a run is not held back longer."""


def check_trackers(names: Iterable[str], option: str = "--track", *, installed: bool = True) -> tuple[str, ...]:
    """Return the trackers that are asked for, each once; refuse one that there is not, or that is not installed."""
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in TRACKERS:
            raise BadInput(option, name, f"no such tracker; allowed: {', '.join(TRACKERS)}")
        if installed and find_spec(name) is None:
            raise BadInput(option, name, f"it is not installed: pip install 'qdsim[{name}]'")
    return chosen


class Follower:
    """Follows one run with any number of trackers; ``with`` it around the run.

    ``warn`` is called in the thread of the run, once for each tracker that fails.
    """

    def __init__(self, trackers: Sequence[str], warn: Callable[[str], object]):
        self._names, self._warn = trackers, warn
        self._problems: list[str] = []
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Follower":
        """Nothing starts before the run has a directory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have the last rows tracked."""
        if self._thread is not None:
            self._over.set()
            self._wake.set()
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                said = " and ".join(self._names)
                self._problems.append(f"{said} did not end within {CLOSE_S:g} s; qdsim export sends what is missing")
        self._say_problems()

    def begin(self, run_dir: StoragePath) -> None:
        """Start to follow a run."""
        if self._names:
            # a daemon: a tracker that hangs must not keep the command
            self._thread = threading.Thread(target=self._follow, args=(run_dir,), name="qdsim-track", daemon=True)
            self._thread.start()

    def take(self, event: Event) -> None:
        """Hear that there may be new rows."""
        if isinstance(event, Progress) and (event.row is not None or event.finished):
            self._wake.set()
        self._say_problems()

    def _say_problems(self) -> None:
        while self._problems:
            self._warn(self._problems.pop(0))

    def _follow(self, run_dir: StoragePath) -> None:
        opened: dict[str, Tracker] = {}
        for name in self._names:
            with self._guarded(name):
                opened[name] = _opened(name, run_dir)
        reader = Reader(run_dir)
        while opened:
            self._wake.clear()  # before it is asked whether the run is over: whoever ends it wakes us after saying so
            ended = self._over.is_set()  # asked before the tables are read: then nothing of them is missed
            began_s = time.monotonic()
            try:
                points = reader.new()
            except Exception as error:  # of the storage, or of a file that somebody else has damaged
                self._problems.append(f"the run is not tracked any more: its tables cannot be read: {_said(error)}")
                break
            for name in [*opened]:
                tracker = opened.pop(name)
                with self._guarded(name):
                    tracker.log(points)
                    opened[name] = tracker
            if ended:
                break
            self._over.wait(max(EVERY_S, SHARE_OF_TIME * (time.monotonic() - began_s)))
            self._wake.wait()
        for name, tracker in opened.items():
            with self._guarded(name):
                tracker.close()

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Have whatever a tracker fails with told, once, and nothing else come of it."""
        try:
            yield
        except BaseException as error:  # some end the process where they should raise
            why = f"{name} failed and is not tracked any more: {_said(error)}"
            self._problems.append(f"{why}; qdsim export RUN --to {name} sends it all")


def export(run_dir: StoragePath, trackers: Sequence[str], folder: Path | None = None) -> list[str]:
    """Send all rows of a run, finished or not, to trackers; return a line for each that says where they are."""
    run_directory.read_manifest(run_dir)
    points = Reader(run_dir).new()
    said = []
    for name in trackers:
        try:
            tracker = _opened(name, run_dir, folder)
            tracker.log(points)
            tracker.close()
        except Exception as error:
            raise QdsimError(f"{name} failed: {_said(error)}") from error
        said.append(tracker.where)
    return said


def _opened(name: str, run_dir: StoragePath, folder: Path | None = None) -> Tracker:
    manifest = run_directory.read_manifest(run_dir)
    run_id = str(manifest.get("run_id") or run_dir.resolve().name)
    beside = run_dir.resolve() if isinstance(run_dir, Path) else Path(run_id)  # of a run in an object store: here
    own = beside if folder is None else folder / run_id
    return TRACKERS[name](Target(run_id, own, manifest.get("config") or {}))


def _said(error: BaseException) -> str:
    line = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {line}".rstrip(": ")
