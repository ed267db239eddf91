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
    "drop node of client N at PHASE:ROUND, break|fill GPU of client N at PHASE:ROUND, "
    "kill driver|command at PHASE:ROUND"
)
PARTS = {"drop": "node", "break": "GPU", "fill": "GPU"}
"""Of a client: what these faults strike."""
_PATTERN = re.compile(
    r"(?P<verb>kill|hang|raise|slow|drop|break|fill)\s+"
    r"(?:(?P<who>driver|command)|(?:(?P<part>node|GPU)\s+of\s+)?client\s+(?P<client>\d+))"
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
        whom = f"{PARTS[self.verb]} of {whom}" if self.verb in PARTS else whom
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
            found["part"] != PARTS.get(found["verb"]) or (who != "client" and found["verb"] != "kill")
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
        elif self.verb == "break":
            _break_gpu()
        elif self.verb == "fill":
            _fill_memory()


def _break_gpu() -> None:
    """Have CUDA report an error, after which this process cannot use its GPU; without one, raise what torch would."""
    import torch  # a job is checked without it

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        place = torch.tensor([1], device="cuda")
        torch.zeros(1, device="cuda")[place].sum().item()  # beyond its end: an assertion on the device
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def _fill_memory() -> None:
    """Ask torch for far more memory than there is: of the GPU, or without one of the machine."""
    import torch

    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    torch.empty(2**50, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")


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
