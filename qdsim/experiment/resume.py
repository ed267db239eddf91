"""What is left to do: a pure plan, from the last commit and from what lies in the run directory.

A run that begins is the same case as one that is resumed: nothing lies there yet, so everything is run.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qdsim.experiment.plan import PhaseKey


@dataclass(frozen=True)
class Skip:
    """The phase is done: its rows are there, and the model that it led to can be read."""


@dataclass(frozen=True)
class Continue:
    """The phase was interrupted after this committed round."""

    round_number: int


@dataclass(frozen=True)
class Run:
    """The phase runs from its beginning."""


Action = Skip | Continue | Run


@dataclass(frozen=True)
class Cursor:
    """The last commit: a round of a phase."""

    key: PhaseKey
    round_number: int


@dataclass(frozen=True)
class Outputs:
    """What a request leaves in the run directory once it is served, each thing by its name there."""

    phases: tuple[PhaseKey, ...]
    model: str
    attacks: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All of it."""
        return [self.model, *(stage_part(key) for key in self.phases), *self.attacks]


def stage_part(key: PhaseKey) -> str:
    """Return the name of the part that a phase writes when it has ended."""
    return f"stages/{key.part}"


def is_served(outputs: Outputs, written: Collection[str]) -> bool:
    """Tell whether a request was served: its model and all its rows are there."""
    return set(outputs.names) <= set(written)


def plan_request(outputs: Outputs, *, commit: Cursor | None, written: Collection[str]) -> tuple[Action, ...]:
    """Say of each phase of a request what to do; ``written`` are the names of what lies in the run directory.

    Where rows of a phase before the commit are missing, the request is served anew.
    """
    if is_served(outputs, written):
        return (Skip(),) * len(outputs.phases)
    if commit is not None and commit.key in outputs.phases:
        before = outputs.phases[: outputs.phases.index(commit.key)]
        if all(stage_part(key) in written for key in before):
            return _from(outputs.phases, commit)
    return (Run(),) * len(outputs.phases)


def plan_training(
    phases: Sequence[PhaseKey], *, commit: Cursor | None, stored_phases: int = 0, states_readable: bool = True
) -> tuple[Action, ...]:
    """Say of each phase of training what to do: take what is stored, or the commit where it is further.

    ``stored_phases``: how many phases a stored training has behind it. ``states_readable``: the client states that the
    commit names are there; without them its model cannot be continued from.
    """
    if commit is not None and states_readable and commit.key in phases[stored_phases:]:
        return _from(phases, commit)
    return (Skip(),) * stored_phases + (Run(),) * (len(phases) - stored_phases)


def _from(phases: Sequence[PhaseKey], commit: Cursor) -> tuple[Action, ...]:
    at = list(phases).index(commit.key)
    return (Skip(),) * at + (Continue(commit.round_number),) + (Run(),) * (len(phases) - at - 1)
