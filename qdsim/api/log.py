"""What a run says on the screen, kept in its directory: ``<run>/log.txt``, a line with its time (UTC) for each."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from qdsim.api.display import outcome, percent_scores, place, who
from qdsim.errors import QdsimError
from qdsim.experiment.progress import Event, Notice, Step
from qdsim.store import storage
from qdsim.store.storage import StoragePath

FILE = "log.txt"


class RunLog:
    """Appends whole lines; what cannot be written is not, since a log is no reason for a run to end.

    An object store takes whole files only: there it is written when the run ends.
    """

    def __init__(self) -> None:
        self._path: StoragePath | None = None
        self._waiting: list[str] = []
        """Lines that are not written yet."""
        self._last = ""

    def begin(self, run_dir: StoragePath, text: str) -> None:
        """Write from now on, what was said before as well."""
        self._path = run_dir / FILE
        self.say(text)

    def take(self, event: Event) -> None:
        """Write a line for a finished round or task, a note, or a step of the start."""
        if isinstance(event, Notice):
            self.say(f"note: {event.text}")
        elif isinstance(event, Step):
            if event.done == event.total:
                self.say(str(event))
        elif event.finished:
            whose = who(event.cell, event.seed, event.method, event.request)
            self.say(f"{whose} done: {outcome(event)}" if event.row else f"{place(event)}: done before")
        elif event.row is not None:
            self.say(f"{place(event)}: {percent_scores(event.row)}, {event.row['wall_s']:.1f} s")

    def end(self, text: str) -> None:
        """Write how the run ended."""
        self.say(text)
        if self._path is not None and not isinstance(self._path, Path):
            earlier = b""
            with suppress(OSError, QdsimError):
                earlier = self._path.read_bytes()
            with suppress(OSError, QdsimError):
                storage.write(self._path, earlier + "".join(self._waiting).encode())

    def say(self, text: str) -> None:
        """Write a line with the time."""
        if text == self._last:
            return
        self._last = text
        self._waiting.append(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {' '.join(text.splitlines())}\n")
        if isinstance(self._path, Path):
            with suppress(OSError):
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                try:
                    os.write(descriptor, "".join(self._waiting).encode())
                finally:
                    os.close(descriptor)
            self._waiting = []
