"""Faults on purpose: ``--chaos "kill client 7 at train:3"`` shows what a run survives on your own cluster.

Each fault strikes once in a run's life, however often the run is resumed: a file in ``<run>/chaos/`` marks it before it
does.
"""

import os
import re
import signal
import time
from dataclasses import dataclass

from qdsim.errors import BadInput
from qdsim.store.storage import StoragePath

GRAMMAR = (
    "one of: kill|hang|raise client N at PHASE:ROUND, slow client N by SECONDS at PHASE:ROUND, "
    "drop node of client N at PHASE:ROUND, kill driver|command at PHASE:ROUND"
)
_PATTERN = re.compile(
    r"(?P<verb>kill|hang|raise|slow|drop)\s+(?:(?P<who>driver|command)|(?:node\s+of\s+)?client\s+(?P<client>\d+))"
    r"(?:\s+by\s+(?P<seconds>\d+(?:\.\d+)?))?\s+at\s+(?P<phase>train|finetune|unlearn|recover|relearn):(?P<round>\d+)"
)


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when."""

    verb: str
    who: str
    """``client``, ``driver`` or ``command``."""
    client_id: int
    phase: str
    round_number: int
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return it as the user writes it."""
        whom = f"client {self.client_id}" if self.who == "client" else self.who
        whom = f"node of {whom}" if self.verb == "drop" else whom
        by = f" by {self.seconds:g}" if self.verb == "slow" else ""
        return f"{self.verb} {whom}{by} at {self.phase}:{self.round_number}"

    @staticmethod
    def parse(text: str) -> "Fault":
        """Read a fault as the user wrote it."""
        found = _PATTERN.fullmatch(text.strip())
        if found is None or int(found["round"]) < 1:
            raise BadInput("--chaos", text, GRAMMAR)
        who = found["who"] or "client"
        if (found["verb"] == "slow") != (found["seconds"] is not None) or (
            ("node" in text) != (found["verb"] == "drop") or (who != "client" and found["verb"] != "kill")
        ):
            raise BadInput("--chaos", text, GRAMMAR)
        client = int(found["client"] or -1)
        return Fault(found["verb"], who, client, found["phase"], int(found["round"]), float(found["seconds"] or 0))

    def strike(self) -> None:
        """Do it, in the process that it is meant for."""
        if self.verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.verb == "drop":
            os.kill(os.getppid(), signal.SIGKILL)  # the raylet, which started this worker
            time.sleep(3600)
        elif self.verb == "hang":
            time.sleep(10**6)
        elif self.verb == "slow":
            time.sleep(self.seconds)
        elif self.verb == "raise":
            raise RuntimeError("raised on purpose (--chaos)")


class Chaos:
    """The faults of a run."""

    def __init__(self, faults: list[Fault], run_dir: StoragePath):
        self._faults = faults
        self._folder = run_dir / "chaos"

    def due(self, who: str, phase: str, round_number: int, client_id: int = -1) -> Fault | None:
        """Return the fault that is due here, and mark it as having struck."""
        for fault in self._faults:
            here = (fault.who, fault.client_id, fault.phase, fault.round_number)
            mark = self._mark(fault)
            if here == (who, client_id, phase, round_number) and not mark.exists():
                self._folder.mkdir(exist_ok=True)
                mark.touch()
                return fault
        return None

    def spared(self) -> list[Fault]:
        """Return the faults that have not struck."""
        return [fault for fault in self._faults if not self._mark(fault).exists()]

    def _mark(self, fault: Fault) -> StoragePath:
        return self._folder / f"{fault.verb}-{fault.who}-{fault.client_id}-{fault.phase}-{fault.round_number}"
