"""Where a run is, for whoever watches it. Nothing here brings torch with it."""

import time
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Notice:
    """Something that the user should know, wherever the run is."""

    text: str
    actor_replaced: bool = False
    """It says that an actor was lost and started again."""


@dataclass(frozen=True)
class Progress:
    """Where the run is: sent at every round and as clients finish."""

    task: int
    """Position in the plan's tasks; -1 while a federation trains."""
    cell: str
    seed: int
    method: str
    request: str
    phase: str
    round_number: int
    rounds: int
    clients_done: int
    clients: int
    share_done: float
    """Of the work that the plan expects."""
    row: Row | None = field(default=None, repr=False)
    """The finished round's row of the table ``rounds``; with ``finished`` the last one before relearning."""
    phase_ended: bool = False
    """The row is the phase's last."""
    finished: bool = False
    """The task is done, or the training was found ready."""


Event = Progress | Notice


class Pace:
    """How long the rest takes, from the rate of the last rounds."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def mark(self, share_done: float) -> None:
        """Take note of how much is done by now."""
        if not self._marks or share_done > self._marks[-1][1]:
            self._marks = [*self._marks[-20:], (time.monotonic(), share_done)]

    def forget(self) -> None:
        """Begin anew: what was skipped tells nothing of the speed."""
        self._marks = []

    def left_s(self) -> float | None:
        """Guess the time left; None where nothing is known yet."""
        if len(self._marks) < 2:
            return None
        (then_s, then), (last_s, last) = self._marks[0], self._marks[-1]
        return (1 - last) * (last_s - then_s) / (last - then) if last > then else None
