"""Commit points: once a round has been evaluated, all that the rest of the run depends on is durable.

``<run>/checkpoint/commit.npz`` holds the cursor (cell, seed, method, request, phase, round), the global model and what
the phases to come need of the past. It is one file, replaced whole, so whatever the moment of a crash there is one last
complete commit. The rounds' rows are written before it, under names of their round: a round that is done again replaces
its own. Clients are at work on the next round meanwhile, unless a rule waits for the accuracies. Synthetic sets are
written by the actors that own them, before a client's update leaves it, into ``<run>/checkpoint/clients/<training>/``,
of which the last three of each client stay; the driver never reads them.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qdsim.algorithms.history import History
from qdsim.errors import BadInput
from qdsim.experiment.plan import PhaseKey
from qdsim.experiment.resume import Cursor
from qdsim.federation.client_states import StateFolder
from qdsim.models import params as P
from qdsim.models.model import Model, check_params
from qdsim.models.params import Arrays, Params
from qdsim.store import arrays, run_directory, storage
from qdsim.store.arrays import ArrayFile
from qdsim.store.run_directory import part_name
from qdsim.store.storage import StoragePath

FIX = "delete it, and the run resumes after the last request that was served"
FOLDER = "checkpoint"


@dataclass(frozen=True)
class Commit:
    """The state of a run after a round."""

    key: PhaseKey
    round_number: int
    ended: bool
    """The round was the phase's last."""
    before: dict[str, float | None]
    """Scores that the phase began with."""
    params: Params
    server_state: Params = field(default_factory=dict)
    """What the server's rule remembers."""
    unlearned: Params | None = None
    """While relearning: the model that had forgotten."""
    history: History | None = None
    """While training: what the server remembers of it."""
    states: dict[int, str] | None = None
    """While synthetic sets change: the tag of each client's last state; None where they are kept nowhere."""

    @property
    def cursor(self) -> Cursor:
        """Where it is."""
        return Cursor(self.key, self.round_number)


class Checkpoint:
    """The commit of one run directory; ``check_owner`` is asked before each write whether the run is still ours."""

    def __init__(self, run_dir: StoragePath, check_owner: Callable[[], None] = lambda: None):
        self._check_owner = check_owner
        self._folder = run_dir / FOLDER
        self._owner = run_directory.identity(run_dir)
        self._first: str | None = None

    def states_folder(self, training: str) -> StateFolder:
        """Return where the clients of a training write their states."""
        path = self._folder / "clients" / run_directory.file_name(training)
        return StateFolder(path, self._owner.run_id, self._owner.unnamed)

    def _file(self, name: str, content: str) -> ArrayFile:
        return ArrayFile(self._folder / name, self._owner.run_id, content, self._owner.unnamed)

    @property
    def _commit_file(self) -> ArrayFile:
        return self._file("commit.npz", "the last commit")

    def _first_file(self, key: PhaseKey) -> ArrayFile:
        return self._file(_first_name(key), f"first updates of {part_name(key.cell, key.seed, key.method, '', '')}")

    def save(self, commit: Commit) -> None:
        """Make a commit; the one before is gone only when this one is there."""
        self._folder.mkdir(exist_ok=True)
        named = commit.key.columns()
        cursor = {"named": named, "round": commit.round_number, "ended": commit.ended, "before": commit.before}
        if commit.states is not None:
            cursor["states"] = {str(client_id): last for client_id, last in commit.states.items()}
        found: Arrays = {f"params/{name}": array for name, array in P.to_numpy(commit.params).items()}
        found |= {f"server/{name}": array for name, array in P.to_numpy(commit.server_state).items()}
        if commit.unlearned is not None:
            found |= {f"forgot/{name}": array for name, array in P.to_numpy(commit.unlearned).items()}
        if commit.history is not None and commit.history.rounds:
            stored = commit.history.to_arrays()
            first = {name: array for name, array in stored.items() if name.startswith("first/")}
            found |= {f"history/{name}": array for name, array in stored.items() if name not in first}
            cursor["first"] = self._write_first(commit, first)
        found["cursor"] = np.frombuffer(json.dumps(cursor).encode(), np.uint8)
        self._check_owner()
        arrays.write(self._commit_file, found)
        for old in self._folder.glob("first-*.npz"):
            if old.name != cursor.get("first"):
                old.unlink()

    def _write_first(self, commit: Commit, first: Arrays) -> str:
        """Write the first round's updates, which do not change any more, into a file of their own, once."""
        name = _first_name(commit.key)
        if self._first != name:
            self._check_owner()
            arrays.write(self._first_file(commit.key), first)
            self._first = name
        return name

    def load(self) -> Commit | None:
        """Return the last commit, or None."""
        path = self._commit_file.path
        if not path.exists():
            return None
        stored = arrays.read(self._commit_file, FIX)
        try:
            cursor = json.loads(stored["cursor"].tobytes())
            key = PhaseKey(**cursor["named"])
            history = None
            if "first" in cursor:
                recorded = _under("history/", stored) | arrays.read(self._first_file(key), FIX)
                history = History.from_arrays(recorded)
            forgot = _under("forgot/", stored)
            return Commit(
                key,
                int(cursor["round"]),
                bool(cursor["ended"]),
                dict(cursor["before"]),
                P.from_numpy(_under("params/", stored)),
                P.from_numpy(_under("server/", stored)),
                P.from_numpy(forgot) if forgot else None,
                history,
                {int(i): _tag(last) for i, last in cursor["states"].items()} if "states" in cursor else None,
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise arrays.damaged(path, error, FIX) from None

    def checked(self, params: Params, model: Model) -> Params:
        """Return a commit's model if it is of this network."""
        return check_params(model, params, self._commit_file.path, FIX)

    def check_committed(self, params: Params, committed: str, what: str) -> None:
        """Refuse a commit whose model is not the one that the rows have the hash of."""
        if P.sha256(params) != committed:
            why = f"holds another model than the rows of {what} say; {FIX}"
            raise BadInput("file", str(self._commit_file.path), why)

    def note_served(self, key: str, task: PhaseKey) -> None:
        """Note under the key of its result that a task was served: a later cell with that key copies it."""
        path = self._served_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"run_id": self._owner.run_id, "key": key, **task.columns()}
        self._check_owner()
        storage.write(path, json.dumps(content).encode() + b"\n")

    def served(self, key: str) -> PhaseKey | None:
        """Return the task that came to the result of this key, or None; a file that says anything else says nothing."""
        try:
            content = json.loads(self._served_file(key).read_text(encoding="utf-8"))
            if (content.pop("run_id"), content.pop("key")) != (self._owner.run_id, key):
                return None
            found = PhaseKey(**content)
            hash(found)  # fails for what no key is made of, such as a list
            return found
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def _served_file(self, key: str) -> StoragePath:
        return self._folder / "served" / f"{key}.json"

    def forget_states(self, training: str) -> None:
        """Delete the client states of a training that is stored as a whole."""
        self._check_owner()
        storage.remove(self.states_folder(training).path)

    def clear(self) -> None:
        """Delete everything: the run is done."""
        self._check_owner()
        storage.remove(self._folder)


def _tag(text: Any) -> str:
    """Return the tag of a state; it becomes part of a file's name, so it must be one."""
    if not re.fullmatch(r"\d-\d{5,}", str(text)):
        raise ValueError(f"{text!r} is no round of a phase")
    return str(text)


def _first_name(key: PhaseKey) -> str:
    return f"first-{run_directory.file_name(str(key.cell))}-{int(key.seed)}.npz"


def _under(prefix: str, stored: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}
