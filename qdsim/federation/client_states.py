"""Where the synthetic sets of a federation's clients can be read again: after an actor was lost, and on resuming.

A client's owner writes its state after every step that changes it, before the update is returned, into a file named
after the client, the phase and the round. The driver never reads these files; it knows their names.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from qdsim.algorithms.phase import RoundContext
from qdsim.store import storage
from qdsim.store.arrays import ArrayFile
from qdsim.store.storage import StoragePath

LEARNING = ("train", "finetune")
"""Phases in which synthetic sets change, in order."""


class StateFolder(NamedTuple):
    """Where the states of a federation's clients lie, and whose they are."""

    path: StoragePath
    owner: str
    """The id of the run, or the hash of the training."""
    unnamed: bool = False
    """The files may be of a version that wrote no owner into them."""


def tag(phase: str, round_number: int) -> str:
    """Return the name of a client's state after a round; names sort as rounds follow each other."""
    return f"{LEARNING.index(phase)}-{round_number:05d}"


def state_file(folder: StateFolder, client_id: int, state_tag: str) -> ArrayFile:
    """Return the file of a client's state after a round."""
    content = f"client {client_id} after {state_tag} in {folder.path.name}"
    return ArrayFile(folder.path / f"{client_id}.{state_tag}.npz", folder.owner, content, folder.unnamed)


def trained_file(folder: StateFolder, client_id: int) -> ArrayFile:
    """Return the file of a client's state in a stored training."""
    return ArrayFile(folder.path / f"{client_id}.npz", folder.owner, f"client {client_id}", folder.unnamed)


def written_states(folder: StateFolder, client_id: int) -> list[StoragePath]:
    """Return the files of a client's states, oldest first; a copy under another name is none of them."""
    found = storage.inside(folder.path, f"{client_id}.*.npz")
    return [path for path in found if re.fullmatch(r"\d+\.\d-\d{5,}\.npz", path.name)]


@dataclass
class ClientStateStore:
    """What is known of the clients' states on storage, for one federation."""

    trained: StateFolder | None = None
    """The folder of a stored training, from which the states were loaded or into which they were saved."""
    folder: StateFolder | None = None
    """The folder into which owners write states while they change; None where not every node can access one."""
    lost_with_actor: bool = False
    """States have changed, and were written nowhere."""
    _tags: dict[int, list[str]] = field(default_factory=dict)
    """The states that each client has written, oldest first."""

    def destination(self) -> StateFolder | None:
        """Return the folder for the state that a step is about to change."""
        if self.folder is None:
            self.lost_with_actor = True
        return self.folder

    def record(self, client_id: int, ctx: RoundContext) -> None:
        """Take note that a client's state after this round is written."""
        if self.folder is not None:
            self._tags.setdefault(client_id, []).append(tag(ctx.phase, ctx.round_number))

    def discard(self, client_id: int) -> None:
        """Forget a client's newest state: its step has to be done again from the one before."""
        if self._tags.get(client_id):
            self._tags[client_id].pop()

    def tags_until(self, phase: str, round_number: int) -> dict[int, str] | None:
        """Return each client's newest state up to a round: clients may be at work on the next one.

        None where no states are written, so a run cannot continue from here.
        """
        if self.folder is None:
            return None
        last = tag(phase, round_number)
        upto = {client_id: [t for t in tags if t <= last] for client_id, tags in self._tags.items()}
        return {client_id: tags[-1] for client_id, tags in upto.items() if tags}

    def files(self, client_ids: Iterable[int]) -> dict[int, ArrayFile]:
        """Return the file of each client's newest state; a client that is not in it is as before training."""
        found: dict[int, ArrayFile] = {}
        for client_id in client_ids:
            if self.folder is not None and self._tags.get(client_id):
                found[client_id] = state_file(self.folder, client_id, self._tags[client_id][-1])
            elif self.trained is not None:
                found[client_id] = trained_file(self.trained, client_id)
        return found

    def keep_in(self, folder: StateFolder | None, tags: dict[int, str] | None = None) -> None:
        """Have states written into a folder from now on; ``tags`` are those that an interrupted run has left there."""
        self.folder = folder
        self._tags = {client_id: [last] for client_id, last in (tags or {}).items()}

    def freeze(self, folder: StateFolder) -> None:
        """Take note that all states lie in the folder of a stored training and do not change any more."""
        self.trained, self.folder, self.lost_with_actor, self._tags = folder, None, False, {}
