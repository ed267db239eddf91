"""Clients as Ray actors behind the Executor interface."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from qdsim import params as P
from qdsim.chaos import Chaos
from qdsim.data import Pixels
from qdsim.evaluation import Counts
from qdsim.federation import pieces
from qdsim.forgetting import Branch
from qdsim.hosts import Keep, Pick, Shard, Shown
from qdsim.hyper import Distillation
from qdsim.models import ConvNet
from qdsim.params import Params
from qdsim.phases import Assignment, ClientStep, ClientUpdate
from qdsim.plan import Plan
from qdsim.ray_actors import ActorPool, Call, Home, cause_of, undisturbed
from qdsim.storage import Folder


class RayExecutor:
    """Clients as Ray actors, placed all at once. Implements :class:`qdsim.federation.Executor`."""

    def __init__(
        self, plan: Plan, run_id: str, images: list[Any], pixels: Pixels, chaos: Chaos, note: Callable[[str], None]
    ):
        wanted = plan.job.cluster
        start_with = (*images, pixels, plan.cells[0].model, wanted.threads, wanted.micro_batch)
        self._pool = ActorPool(plan, run_id, start_with, note)
        self._chaos = chaos
        self.busy_s = 0.0
        self.device = "cuda" if any(self._pool.on_gpu) else "cpu"
        self._actor_of = {c: a for a, group in enumerate(self._pool.clients) for c in group}
        self._sizes = np.zeros(plan.max_clients, dtype=np.int64)
        self._sent: tuple[Params | None, Any] = (None, None)

    @property
    def wait_s(self) -> float:
        """How long the last ``map`` waited for clients."""
        return self._pool.wait_s

    @wait_s.setter
    def wait_s(self, value: float) -> None:
        self._pool.wait_s = value

    def _put(self, params: Params) -> Any:
        """Put the global model into the store once, however many calls read it."""
        if self._sent[0] is not params:
            self._sent = (params, ray.put(P.to_numpy(params)))
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
        """Start the largest clients first; yield in the order of ``client_ids``, early ones wait as refs."""
        self.wait_s = self.busy_s = 0.0
        self._strike("driver", names)
        self._pool.home = self._pool.home.at_round(keep, names)
        ref = self._put(params)
        busy = [0.0] * len(self._pool.clients)
        started = sorted(client_ids, key=lambda i: -self._sizes[i])
        faults = [self._chaos.due("client", names.phase, names.round_number, i) for i in started]
        calls: list[Call] = [
            (self._actor_of[i], "step", (ref, client_step, i, names, keep, fault))
            for i, fault in zip(started, faults, strict=True)
        ]
        early: dict[int, tuple[ClientUpdate, Any]] = {}
        due = deque(client_ids)
        for done, (index, update, refs) in enumerate(self._pool.dispatch(calls, names), start=1):
            early[started[index]] = (update, refs[1])
            self._pool.home.finish(started[index])
            self._pool.longest_s[names.phase] = max(update.step_s, self._pool.longest_s.get(names.phase, 0.0))
            on_done(done)
            while due and due[0] in early:
                client_id = due.popleft()
                update, delta = early.pop(client_id)
                update.delta = self._fetch(delta, calls[started.index(client_id)], names)
                busy[self._actor_of[client_id]] += update.step_s
                self.busy_s = self._least_time(busy)
                yield update

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
        return P.from_numpy(found)

    def _least_time(self, busy: list[float]) -> float:
        """Return the longest that an actor, or a node's slots together, were busy."""
        on_cpu = [(self._pool.nodes[a], s) for a, s in enumerate(busy) if not self._pool.on_gpu[a]]
        shared = [sum(s for n, s in on_cpu if n == node) / slots for node, slots in self._pool.slots.items()]
        return max([*busy, *shared])

    def test_counts(self, params: Params, num_test: int) -> Counts:
        """Spread the test set over as many actors as may run at once."""
        ref = self._put(params)
        ranges = pieces(num_test, self._lanes())
        calls: list[Call] = [(i, "test_counts", (ref, start, stop)) for i, (start, stop) in enumerate(ranges)]
        return _total(self._pool.gather(calls))

    def own_counts(self, params: Params, client_ids: list[int], branch: Branch) -> tuple[Counts, Counts]:
        """Count where the data are."""
        ref = self._put(params)
        owned = [[i for i in group if i in set(client_ids)] for group in self._pool.clients]
        calls: list[Call] = [(a, "own_counts", (ref, ids, branch)) for a, ids in enumerate(owned) if ids]
        halves = self._pool.gather(calls)
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
        """Look at samples where they are; actors hold ascending runs of clients, so the order is that of clients."""
        ref = self._put(params)
        owned = [{i: positions[i] for i in group if i in positions} for group in self._pool.clients]
        calls: list[Call] = [(a, "own_features", (ref, own)) for a, own in enumerate(owned) if own]
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
