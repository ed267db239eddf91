"""The round loop, and the one interface behind which clients run: here, or as Ray actors."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Assignment, ClientStep, ClientUpdate, Phase
from qdsim.algorithms.settings import Distillation
from qdsim.data.forgetting import Branch
from qdsim.errors import ClientFailed, StorageFailed
from qdsim.federation.client_host import ClientHost, Keep, Pick, Shard, Shown
from qdsim.federation.evaluation import BATCH, Counts
from qdsim.models import params as P
from qdsim.models.convnet import ConvNet
from qdsim.models.params import Params
from qdsim.store.storage import Folder


@dataclass(frozen=True)
class Looked:
    """What looking at a model found."""

    test: Counts
    own: Counts | None
    """On the data of the clients that a request is about, where it is about clients."""
    elapsed_s: float
    """The least time that it takes on the actors there are."""


Then = Callable[[Looked], None]


class Executor(Protocol):
    """Where clients live. Every method gives the same numbers whatever stands behind it."""

    wait_s: float
    """How long the last ``map`` waited for clients."""

    busy_s: float
    """The least time that its steps could take on the actors and slots there are; the rest of the wait is moving."""

    beside_s: float
    """By how much that grows because of what was looked at beside it."""

    device: str
    """``cpu`` or ``cuda``: their bits differ."""

    def adopt(self, model: ConvNet, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Give every client its shard, as it is before training."""

    def map(
        self,
        client_step: ClientStep,
        params: Params,
        client_ids: list[int],
        names: Assignment,
        on_done: Callable[[int], None],
        keep: Keep = None,
    ) -> Iterator[ClientUpdate]:
        """Run a step on each client; yield the updates in the order of ``client_ids``.

        ``keep`` is the folder into which the owners write the states that the step changes; None where it changes
        none, empty where not every owner sees one.
        """

    def look(self, params: Params, num_test: int, client_ids: list[int], branch: Branch, then: Then) -> None:
        """Count on the test set, and these clients' forget sets, beside the next ``map``: ``then`` is told at once.

        Nothing else may be asked before that ``map``, or before :meth:`finish_look`.
        """

    def finish_look(self) -> None:
        """Wait for what :meth:`look` has asked for, with nothing beside it."""

    def own_counts(self, params: Params, client_ids: list[int], branch: Branch) -> tuple[Counts, Counts]:
        """Count on the clients' own data: forget set, and the rest."""

    def test_features(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Return what an attack sees of test samples, in the order of ``rows``."""

    def own_features(self, params: Params, positions: dict[int, np.ndarray]) -> np.ndarray:
        """Return what an attack sees of clients' own samples, in the order of client numbers."""

    def save_clients(self, folder: Folder) -> None:
        """Have every owner write its clients' synthetic sets there."""

    def sees(self, folder: Folder) -> bool:
        """Tell whether every owner's node sees a folder."""

    def settle(self, folder: Folder) -> None:
        """Take note that the states lie in this folder and do not change any more."""

    def load_clients(self, folder: Folder, fix: str) -> None:
        """Have every owner read its clients' synthetic sets from there; ``fix`` is said of a damaged file."""

    def restore(self, folder: Folder, reached: dict[int, str]) -> None:
        """Have every owner take its clients' states as they were after a round; see :meth:`ClientHost.restore`."""

    def gallery(self, picks: list[Pick], init: str) -> list[Shown]:
        """Return synthetic images with the real ones they began as, in the order of ``picks``."""

    def storage_bytes(self) -> int:
        """Return what all clients store for unlearning."""


class InlineExecutor:
    """All clients in this process, one after the other: for debugging, and to compare Ray with."""

    def __init__(self, host: ClientHost):
        self._host = host
        self.wait_s = self.busy_s = self.beside_s = 0.0
        self.device = "cpu"

    def adopt(self, model: ConvNet, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Give every client its shard."""
        self._host.adopt(model, run_seed, shards, synthetic)

    def map(
        self,
        client_step: ClientStep,
        params: Params,
        client_ids: list[int],
        names: Assignment,
        on_done: Callable[[int], None],
        keep: Keep = None,
    ) -> Iterator[ClientUpdate]:
        """Run the steps in order."""
        self.wait_s = self.busy_s = 0.0
        for done, client_id in enumerate(client_ids, start=1):
            began_s = time.perf_counter()
            try:
                update = self._host.step(client_step, params, client_id, names, keep)
            except StorageFailed:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                raise ClientFailed(client_id, names.phase, names.round_number, "this machine", cause) from error
            self.wait_s += time.perf_counter() - began_s
            self.busy_s += update.step_s
            on_done(done)
            yield update

    def look(self, params: Params, num_test: int, client_ids: list[int], branch: Branch, then: Then) -> None:
        """Look at once: here nothing can run beside it."""
        began_s = time.perf_counter()
        own = self.own_counts(params, client_ids, branch)[0] if client_ids else None
        then(Looked(self._host.test_counts(params, 0, num_test), own, time.perf_counter() - began_s))

    def finish_look(self) -> None:
        """Nothing to do: it is done."""

    def own_counts(self, params: Params, client_ids: list[int], branch: Branch) -> tuple[Counts, Counts]:
        """Count on the clients' own data."""
        return self._host.own_counts(params, client_ids, branch)

    def test_features(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Look at test samples."""
        return self._host.test_features(params, rows)

    def own_features(self, params: Params, positions: dict[int, np.ndarray]) -> np.ndarray:
        """Look at the clients' own samples."""
        return self._host.own_features(params, positions)

    def save_clients(self, folder: Folder) -> None:
        """Write the synthetic sets."""
        self._host.save_clients(folder)

    def sees(self, folder: Folder) -> bool:
        """Look for the folder."""
        return self._host.sees(folder)

    def settle(self, folder: Folder) -> None:
        """Nothing to do: what this process has, it loses only with everything else."""

    def load_clients(self, folder: Folder, fix: str) -> None:
        """Read the synthetic sets."""
        self._host.load_clients(folder, fix)

    def restore(self, folder: Folder, reached: dict[int, str]) -> None:
        """Read the states."""
        self._host.restore(folder, reached)

    def gallery(self, picks: list[Pick], init: str) -> list[Shown]:
        """Return the images."""
        return self._host.gallery(picks, init)

    def storage_bytes(self) -> int:
        """Return what all clients store."""
        return self._host.storage_bytes()


@dataclass
class RoundResult:
    """What one round did, before anybody evaluated it."""

    round_number: int
    params: Params
    updates: list[ClientUpdate]
    """Without their deltas: these are gone once they are summed."""
    expected: int
    bytes_down: int
    wall_s: float
    """From the choice of participants to the new model, without what looking at the model before has added to it."""
    wait_s: float
    busy_s: float
    aggregation_s: float


def run_rounds(
    phase: Phase,
    params: Params,
    sizes: np.ndarray,
    executor: Executor,
    run_seed: int,
    request: str,
    on_client: Callable[[int, int, int], None],
    history: History | None = None,
    first: int = 1,
    keep: Keep = None,
) -> Iterator[RoundResult]:
    """Run a phase: select, client steps, server step, in every round. ``sizes`` are the |Z_i|.

    ``on_client(round, expected, done)`` is told whenever a client has finished; ``history`` records the updates.
    ``first`` is the round to begin with, ``keep`` the folder for the states that clients change.
    """
    for round_number in range(first, phase.stage.rounds + 1):
        started_s = time.perf_counter()
        names = Assignment(run_seed, request, phase.name, round_number)
        ids = phase.select(sizes, names)
        kept: list[ClientUpdate] = []
        report = partial(on_client, round_number, len(ids))
        # a round without participants asks nobody, and so resets nothing
        executor.wait_s = executor.busy_s = executor.beside_s = 0.0
        updates = executor.map(phase.client_step, params, ids, names, report, keep)
        before_s = time.perf_counter()
        params = phase.server_step(params, _dropping_deltas(updates, kept, names, history), names)
        step_s = time.perf_counter() - before_s
        yield RoundResult(
            round_number=round_number,
            params=params,
            updates=kept,
            expected=len(ids),
            bytes_down=len(ids) * P.size_bytes(params),
            wall_s=time.perf_counter() - started_s - executor.beside_s,
            wait_s=executor.wait_s,
            busy_s=executor.busy_s,
            aggregation_s=max(0.0, step_s - executor.wait_s),
        )


def _dropping_deltas(
    updates: Iterator[ClientUpdate], kept: list[ClientUpdate], names: Assignment, history: History | None
) -> Iterator[ClientUpdate]:
    """Hand each update on, then keep it without its delta: one is in memory at a time."""
    for update in updates:
        update.bytes_up = P.size_bytes(update.delta)
        if history is not None:
            history.record(names.round_number, update.client_id, update.num_samples, update.delta)
        yield update
        update.delta = {}
        kept.append(update)


def pieces(num_test: int, parts: int) -> list[tuple[int, int]]:
    """Cut the test set into at most ``parts`` ranges that begin at multiples of the evaluation batch."""
    batches = -(-num_test // BATCH)
    edges = sorted({min(num_test, BATCH * (batches * i // parts)) for i in range(parts)} | {0, num_test})
    return list(pairwise(edges))
