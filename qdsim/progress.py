"""Where a run is, for whoever watches it."""

from dataclasses import dataclass, field

from qdsim import rows
from qdsim.forgetting import Branch
from qdsim.plan import Cell, SeedPlan
from qdsim.rows import Row

NOWHERE = -2


@dataclass(frozen=True)
class Progress:
    """Where the run is: sent to whoever watches, at every round and as clients finish."""

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
    note: str = ""
    """Something that the user should know."""
    finished: bool = False
    """The task is done, or the training was found ready."""

    @property
    def is_only_note(self) -> bool:
        """It says something, and not where the run is."""
        return self.task == NOWHERE

    @staticmethod
    def note_only(note: str) -> "Progress":
        """Return an event that says something, wherever the run is."""
        return Progress(NOWHERE, "", 0, "", "", "", 0, 0, 0, 0, 0.0, note=note)


@dataclass(frozen=True)
class Place:
    """Whose phase it is."""

    task: int
    cell: Cell
    seed_plan: SeedPlan
    method: str
    branch: Branch

    def keys(self, phase: str) -> Row:
        """Return what names the phase in every table."""
        return rows.keys(self.cell, self.seed_plan, self.method, self.branch.label, phase)

    def progress(self, phase: str, rounds: int, share_done: float) -> Progress:
        """Return the event that a phase begins with."""
        named = (self.cell.label, self.seed_plan.seed, self.method, self.branch.label, phase)
        return Progress(self.task, *named, 0, rounds, 0, 0, share_done)
