"""Clients as Ray actors behind the Executor interface."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from qdsim.algorithms.phase import Assignment, ClientStep, ClientUpdate
from qdsim.algorithms.settings import Distillation
from qdsim.data.forgetting import Branch
from qdsim.experiment.plan import Plan
from qdsim.federation.chaos import Chaos
from qdsim.federation.client_host import Keep, Pick, Shard, Shown
from qdsim.federation.evaluation import Counts
from qdsim.federation.rounds import Looked, Then, pieces
from qdsim.models import params as P
from qdsim.models.convnet import ConvNet
from qdsim.models.params import Params
from qdsim.ray_engine.pool import ActorPool, Call, Home, cause_of, undisturbed
from qdsim.ray_engine.worker_group import Crew
from qdsim.store.storage import Folder

SMALL_BYTES = 100_000
"""A model of this size goes along with each call: up to 100 KiB Ray sends what is passed as part of the message, which
takes a fifth less time than having every actor look it up in its node's store."""
PIECES_A_LANE = 4
"""The test set is cut finely, so that actors with less to do in a round can take more of it."""


@dataclass
class _Look:
    """A model that is to be looked at, and what was found so far."""

    ref: Any
    num_test: int
    client_ids: list[int]
    branch: Branch
    then: Then
    left: int = 0
    test: list[Counts] = field(default_factory=list)
    own: list[Counts] = field(default_factory=list)


class RayExecutor:
    """Clients as Ray actors, placed all at once. Implements :class:`qdsim.federation.rounds.Executor`."""

    def __init__(self, plan: Plan, crew: Crew, chaos: Chaos, note: Callable[[str], None]):
        self._pool = ActorPool(plan.job.cluster, crew, note)
        self._chaos = chaos
        self.busy_s = self.beside_s = 0.0
        self.device = "cuda" if any(self._pool.on_gpu) else "cpu"
        self._actor_of = {c: a for a, group in enumerate(self._pool.clients) for c in group}
        self._sizes = np.zeros(plan.max_clients, dtype=np.int64)
        self._sent: tuple[Params | None, Any] = (None, None)
        self._look: _Look | None = None
        self._took_s: dict[tuple[str, int], float] = {}
        """The last step of each client, by phase."""
        self._sample_s = 0.0
        """What looking at a test sample took."""

    @property
    def wait_s(self) -> float:
        """How long the last ``map`` waited for clients."""
        return self._pool.wait_s

    @wait_s.setter
    def wait_s(self, value: float) -> None:
        self._pool.wait_s = value

    def _put(self, params: Params) -> Any:
        """Return the global model as calls are given it: put into the store once, unless it is small."""
        if self._sent[0] is not params:
            packed = P.pack(params)
            self._sent = (params, packed if P.size_bytes(params) < SMALL_BYTES else ray.put(packed))
        return self._sent[1]

    def adopt(self, model: ConvNet, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Give every actor its clients' shards; a cell of a sweep may have fewer clients than another."""
        self._sizes = np.array([len(shard.indices) for shard in shards])
        calls: list[Call] = []
        for actor, group in enumerate(self._pool.clients):
            own = [shards[i] for i in group if i < len(shards)]
            calls.append((actor, "adopt", (model, run_seed, own, synthetic)))
        self._pool.adopted, self._pool.home = [], Home()
        self._pool.gather(calls)
        self._pool.adopted = calls

    def map(
        self,
        client_step: ClientStep,
        params: Params,
        client_ids: list[int],
        names: Assignment,
        on_done: Callable[[int], None],
        keep: Keep = None,
    ) -> Iterator[ClientUpdate]:
        """Start the largest clients first; yield in the order of ``client_ids``, early ones wait as refs.

        What is to be looked at comes before them, on the actors that have the least to do.
        """
        self.wait_s = self.busy_s = self.beside_s = 0.0
        self._strike("driver", names)
        self._pool.home = self._pool.home.at_round(keep, names)
        ref = self._put(params)
        busy, looking = ([0.0] * len(self._pool.clients) for _ in range(2))
        started = sorted(client_ids, key=lambda i: -self._sizes[i])
        faults = [self._chaos.due("client", names.phase, names.round_number, i) for i in started]
        look, self._look = self._look, None
        beside = self._calls(look, self._expected_s(client_ids, names.phase)) if look else []
        calls: list[Call] = [
            (self._actor_of[i], "step", (ref, client_step, i, names, keep, fault))
            for i, fault in zip(started, faults, strict=True)
        ]
        early: dict[int, tuple[ClientUpdate, Any]] = {}
        due = deque(client_ids)
        done = 0
        for index, result, refs in self._pool.dispatch([*beside, *calls], names):
            if look and index < len(beside):
                self._take(look, beside[index], result, looking)
                continue
            done += 1
            client_id, update = started[index - len(beside)], result
            early[client_id] = (update, refs[1])
            self._pool.home.finish(client_id)
            self._pool.longest_s[names.phase] = max(update.step_s, self._pool.longest_s.get(names.phase, 0.0))
            self._took_s[names.phase, client_id] = update.step_s
            on_done(done)
            while due and due[0] in early:
                client_id = due.popleft()
                update, delta = early.pop(client_id)
                update.delta = self._fetch(delta, calls[started.index(client_id)], names)
                busy[self._actor_of[client_id]] += update.step_s
                self.busy_s = self._least_time(busy)
                yield update
        self.beside_s = self._least_time([a + b for a, b in zip(busy, looking, strict=True)]) - self.busy_s

    def _expected_s(self, client_ids: list[int], phase: str) -> list[float]:
        """Return how long each actor will be busy with these clients, as far as their last steps tell."""
        known = [self._took_s[phase, i] for i in client_ids if (phase, i) in self._took_s]
        usual = sum(known) / len(known) if known else 1.0
        load = [0.0] * len(self._pool.clients)
        for i in client_ids:
            load[self._actor_of[i]] += self._took_s.get((phase, i), usual)
        return load

    def look(self, params: Params, num_test: int, client_ids: list[int], branch: Branch, then: Then) -> None:
        """Keep in mind what is to be looked at."""
        self.finish_look()  # a round may have asked no client anything
        self._look = _Look(self._put(params), num_test, client_ids, branch, then)

    def finish_look(self) -> None:
        """Look now, if no ``map`` has."""
        look, self._look = self._look, None
        if look is None:
            return
        looking = [0.0] * len(self._pool.clients)
        calls = self._calls(look, list(looking))
        for index, result, _ in self._pool.dispatch(calls):
            self._take(look, calls[index], result, looking)

    def _calls(self, look: _Look, load: list[float]) -> list[Call]:
        """Share a look out: samples of clients where they are, the test set where there is the least to do."""
        calls: list[Call] = [(self._actor_of[i], "own_counts", (look.ref, [i], look.branch)) for i in look.client_ids]
        sample_s = self._sample_s or sum(load) / len(load) / max(look.num_test, 1)
        for start, stop in pieces(look.num_test, PIECES_A_LANE * self._lanes()):
            actor = load.index(min(load))
            load[actor] += (sample_s or 1.0) * (stop - start)
            calls.append((actor, "test_counts", (look.ref, start, stop)))
        look.left = len(calls)
        return calls

    def _take(self, look: _Look, call: Call, result: Any, looking: list[float]) -> None:
        """Take what a call has found; tell when it was the last."""
        actor, method, arguments = call
        found, elapsed_s = result
        looking[actor] += elapsed_s
        if method == "own_counts":
            look.own.append(found[0])
        else:
            look.test.append(found)
            self._sample_s = elapsed_s / (arguments[2] - arguments[1])
        look.left -= 1
        if not look.left:
            began_s = time.perf_counter()
            look.then(Looked(_total(look.test), _total(look.own) if look.own else None, self._least_time(looking)))
            self.wait_s += time.perf_counter() - began_s  # clients are at work meanwhile

    def _strike(self, who: str, names: Assignment) -> None:
        fault = self._chaos.due(who, names.phase, names.round_number)
        if fault is not None:
            fault.strike()

    def _fetch(self, delta: Any, call: Call, names: Assignment) -> Params:
        """Fetch an update; if it was lost with its node after the step, the step is done again."""
        began_s = time.perf_counter()
        actor, _, arguments = call
        while True:
            try:
                found = ray.get(delta)
                break
            except RayError as error:
                self._pool.home.finished.discard(arguments[2])
                self._pool.replace(actor, cause_of(error))
                _, _, refs = next(self._pool.dispatch([undisturbed(call)], names))
                self._pool.home.finish(arguments[2])
                delta = refs[1]
        self.wait_s += time.perf_counter() - began_s
        return P.unpack(found)

    def _least_time(self, busy: list[float]) -> float:
        """Return the longest that an actor, or a node's slots together, were busy."""
        on_cpu = [(self._pool.nodes[a], s) for a, s in enumerate(busy) if not self._pool.on_gpu[a]]
        shared = [sum(s for n, s in on_cpu if n == node) / slots for node, slots in self._pool.slots.items()]
        return max([*busy, *shared])

    def own_counts(self, params: Params, client_ids: list[int], branch: Branch) -> tuple[Counts, Counts]:
        """Count where the data are."""
        ref = self._put(params)
        owned = [[i for i in group if i in set(client_ids)] for group in self._pool.clients]
        calls: list[Call] = [(a, "own_counts", (ref, ids, branch)) for a, ids in enumerate(owned) if ids]
        halves = [found for found, _ in self._pool.gather(calls)]
        return _total([f for f, _ in halves]), _total([r for _, r in halves])

    def _lanes(self) -> int:
        """Return how many actors may compute at once."""
        return (
            len(self._pool.clients)
            if any(self._pool.on_gpu)
            else min(len(self._pool.clients), sum(self._pool.slots.values()))
        )

    def test_features(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Spread the samples as the test set is."""
        ref = self._put(params)
        ranges = pieces(len(rows), self._lanes())
        calls: list[Call] = [(i, "test_features", (ref, rows[a:b])) for i, (a, b) in enumerate(ranges)]
        return np.concatenate(self._pool.gather(calls))

    def own_features(self, params: Params, positions: dict[int, np.ndarray]) -> np.ndarray:
        """Look at samples where they are, client by client."""
        ref = self._put(params)
        calls: list[Call] = [(self._actor_of[i], "own_features", (ref, {i: positions[i]})) for i in sorted(positions)]
        return np.concatenate(self._pool.gather(calls))

    def save_clients(self, folder: Folder) -> None:
        """Have each actor write its own."""
        self._pool.gather([(actor, "save_clients", (folder,)) for actor in range(len(self._pool.clients))])

    def settle(self, folder: Folder) -> None:
        """From now on a lost client's state is found here, and does not change any more."""
        self._pool.home = Home(base=folder)

    def sees(self, folder: Folder) -> bool:
        """Ask each actor."""
        return all(self._pool.gather([(actor, "sees", (folder,)) for actor in range(len(self._pool.clients))]))

    def load_clients(self, folder: Folder, fix: str) -> None:
        """Have each actor read its own."""
        self._pool.gather([(actor, "load_clients", (folder, fix)) for actor in range(len(self._pool.clients))])
        self.settle(folder)

    def restore(self, folder: Folder, reached: dict[int, str]) -> None:
        """Have each actor read its own."""
        groups = self._pool.clients
        own = [{i: reached[i] for i in group if i in reached} for group in groups]
        self._pool.gather([(actor, "restore", (folder, found)) for actor, found in enumerate(own)])
        self._pool.home = Home(self._pool.home.base, folder, dict(reached))

    def gallery(self, picks: list[Pick], init: str) -> list[Shown]:
        """Ask the owners."""
        owners = [self._actor_of[client_id] for client_id, _, _ in picks]
        calls: list[Call] = [(a, "gallery", ([pick], init)) for a, pick in zip(owners, picks, strict=True)]
        return [shown for (shown,) in self._pool.gather(calls)]

    def storage_bytes(self) -> int:
        """Return what all clients store."""
        return sum(self._pool.gather([(actor, "storage_bytes", ()) for actor in range(len(self._pool.clients))]))


def _total(counts: list[Counts]) -> Counts:
    total = counts[0]
    for other in counts[1:]:
        total = total + other
    return total
