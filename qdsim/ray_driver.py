"""The driver actor, which schedules and aggregates, and its clients behind the Executor interface."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from qdsim import params as P
from qdsim import ray_cluster
from qdsim.data import Pixels
from qdsim.errors import BadInput, CannotPlace, ClientFailed, QdsimError
from qdsim.evaluation import Counts
from qdsim.experiment import Experiment, Progress
from qdsim.federation import pieces
from qdsim.forgetting import Branch
from qdsim.hosts import Images, Pick, Shard, Shown, use_threads
from qdsim.hyper import Distillation
from qdsim.models import ConvNet
from qdsim.params import Params
from qdsim.phases import Assignment, ClientStep, ClientUpdate
from qdsim.plan import Plan
from qdsim.ray_clients import ClientActor

ACTOR_START_S = 30.0
"""Slowest start of one actor that is still believed: torch takes 2 to 3 s of a core to import."""
PROGRESS_EVERY_S = 0.2
POLL_S = 0.25


Call = tuple[int, str, tuple[Any, ...]]
"""Actor, method, arguments."""


class RayExecutor:
    """Clients as Ray actors, placed all at once. Implements :class:`qdsim.federation.Executor`."""

    def __init__(self, plan: Plan, images: list[Any], pixels: Pixels):
        wanted = plan.job.cluster
        self.wait_s = self.busy_s = 0.0
        self._layout = ray_cluster.lay_out(plan.max_clients, wanted, ray_cluster.nodes())
        self._actor_of = {c: a for a, group in enumerate(self._layout.clients) for c in group}
        self._sizes = np.zeros(plan.max_clients, dtype=np.int64)
        self._group = self._reserve(wanted.placement_timeout_s)
        cls: Any = ClientActor
        self._actors = [
            cls.options(
                num_cpus=self._layout.cpus,
                num_gpus=self._layout.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
                name=f"clients-{group[0]}-{group[-1]}-{self._group.id.hex()[:8]}",
            ).remote(*images, pixels, plan.cells[0].model, wanted.threads, wanted.micro_batch)
            for bundle, group in enumerate(self._layout.clients)
        ]
        self._nodes, self._on_gpu = self._wait_for_actors()
        self.device = "cuda" if any(self._on_gpu) else "cpu"
        self._slots = self._count_slots(wanted.threads)
        self._sent: tuple[Params | None, Any] = (None, None)

    def _reserve(self, timeout_s: float) -> Any:
        layout = self._layout
        group = placement_group([layout.bundle] * len(layout.clients), strategy="SPREAD")
        if group.wait(timeout_s):
            return group
        remove_placement_group(group)
        ask = f"{len(layout.clients)} actors of {layout.bundle} each"
        free = ray_cluster.free()
        fix = "wait for other jobs to end, set cluster.clients_per_actor higher or cluster.gpus_per_client lower"
        raise CannotPlace(ask, f"{free} free after {timeout_s:g} s (cluster.placement_timeout_s)", fix)

    def _wait_for_actors(self) -> tuple[list[str], list[bool]]:
        refs = [actor.describe.remote() for actor in self._actors]
        timeout_s = 60 + ACTOR_START_S * len(refs)
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        if late:
            found = f"{len(ready)} that started within {timeout_s:g} s"
            raise CannotPlace(f"{len(refs)} actors", found, "set cluster.clients_per_actor higher")
        try:
            places = ray.get(refs)
        except RayError as error:
            fix = "look at Ray's logs of that node, or set cluster.clients_per_actor higher if it ran out of memory"
            raise CannotPlace(f"{len(refs)} actors", _cause(error), fix) from error
        return [node for node, _, _ in places], [device == "cuda" for _, _, device in places]

    def _count_slots(self, threads: int) -> dict[str, int]:
        """Return how many calls may run at once on each node: as many as it has cores."""
        cores = {node.node_id: int(node.cpus) for node in ray_cluster.nodes()}
        return {node: max(1, cores.get(node, 1) // threads) for node in set(self._nodes)}

    def _dispatch(self, calls: list[Call]) -> Iterator[tuple[int, Any]]:
        """Start calls in order, no more at once than cores or GPU slots; yield each with its refs when done."""
        waiting = deque(enumerate(calls))
        running: dict[Any, tuple[int, int, Any]] = {}
        busy: set[int] = set()
        used = dict.fromkeys(self._slots, 0)
        while waiting or running:
            for _ in range(len(waiting)):
                index, (actor, method, arguments) = waiting.popleft()
                node = self._nodes[actor]
                if actor in busy or (not self._on_gpu[actor] and used[node] >= self._slots[node]):
                    waiting.append((index, (actor, method, arguments)))
                    continue
                refs = getattr(self._actors[actor], method).remote(*arguments)
                first = refs[0] if isinstance(refs, list) else refs
                running[first] = (index, actor, refs)
                busy.add(actor)
                used[node] += 1
            began_s = time.perf_counter()
            done, _ = ray.wait(list(running), num_returns=1, fetch_local=False)
            self.wait_s += time.perf_counter() - began_s
            for ref in done:
                index, actor, refs = running.pop(ref)
                busy.discard(actor)
                used[self._nodes[actor]] -= 1
                yield index, refs

    def _gather(self, calls: list[Call]) -> list[Any]:
        results: list[Any] = [None] * len(calls)
        for index, ref in self._dispatch(calls):
            actor, method, _ = calls[index]
            try:
                results[index] = ray.get(ref)
            except RayError as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, BadInput):
                    raise error.cause from None
                raise ClientFailed(
                    self._layout.clients[actor][0], method, 0, self._where(actor), _cause(error)
                ) from error
        return results

    def _where(self, actor: int) -> str:
        return f"node {self._nodes[actor][:8]}"

    def _put(self, params: Params) -> Any:
        """Put the global model into the store once, however many calls read it."""
        if self._sent[0] is not params:
            self._sent = (params, ray.put(P.to_numpy(params)))
        return self._sent[1]

    def adopt(self, model: ConvNet, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Give every actor its clients' shards; a cell of a sweep may have fewer clients than another."""
        self._sizes = np.array([len(shard.indices) for shard in shards])
        calls: list[Call] = []
        for actor, group in enumerate(self._layout.clients):
            own = [shards[i] for i in group if i < len(shards)]
            calls.append((actor, "adopt", (model, run_seed, own, synthetic)))
        self._gather(calls)

    def map(
        self,
        client_step: ClientStep,
        params: Params,
        client_ids: list[int],
        names: Assignment,
        on_done: Callable[[int], None],
    ) -> Iterator[ClientUpdate]:
        """Start the largest clients first; yield in the order of ``client_ids``, early ones wait as refs."""
        self.wait_s = self.busy_s = 0.0
        ref = self._put(params)
        busy = [0.0] * len(self._actors)
        started = sorted(client_ids, key=lambda i: -self._sizes[i])
        calls: list[Call] = [(self._actor_of[i], "step", (ref, client_step, i, names)) for i in started]
        early: dict[int, Any] = {}
        due = deque(client_ids)
        for done, (index, refs) in enumerate(self._dispatch(calls), start=1):
            early[started[index]] = refs
            on_done(done)
            while due and due[0] in early:
                client_id = due.popleft()
                update = self._fetch(early.pop(client_id), client_id, names)
                busy[self._actor_of[client_id]] += update.step_s
                self.busy_s = self._least_time(busy)
                yield update

    def _least_time(self, busy: list[float]) -> float:
        """Return the longest that an actor, or a node's slots together, were busy."""
        on_cpu = [(self._nodes[a], s) for a, s in enumerate(busy) if not self._on_gpu[a]]
        shared = [sum(s for n, s in on_cpu if n == node) / slots for node, slots in self._slots.items()]
        return max([*busy, *shared])

    def _fetch(self, refs: Any, client_id: int, names: Assignment) -> ClientUpdate:
        began_s = time.perf_counter()
        try:
            update, delta = ray.get(refs)
        except RayError as error:
            where = self._where(self._actor_of[client_id])
            raise ClientFailed(client_id, names.phase, names.round_number, where, _cause(error)) from error
        self.wait_s += time.perf_counter() - began_s
        update.delta = P.from_numpy(delta)
        assert isinstance(update, ClientUpdate)
        return update

    def test_counts(self, params: Params, num_test: int) -> Counts:
        """Spread the test set over as many actors as may run at once."""
        ref = self._put(params)
        ranges = pieces(num_test, self._lanes())
        calls: list[Call] = [(i, "test_counts", (ref, start, stop)) for i, (start, stop) in enumerate(ranges)]
        return _total(self._gather(calls))

    def own_counts(self, params: Params, client_ids: list[int], branch: Branch) -> tuple[Counts, Counts]:
        """Count where the data are."""
        ref = self._put(params)
        owned = [[i for i in group if i in set(client_ids)] for group in self._layout.clients]
        calls: list[Call] = [(a, "own_counts", (ref, ids, branch)) for a, ids in enumerate(owned) if ids]
        halves = self._gather(calls)
        return _total([f for f, _ in halves]), _total([r for _, r in halves])

    def _lanes(self) -> int:
        """Return how many actors may compute at once."""
        return len(self._actors) if any(self._on_gpu) else min(len(self._actors), sum(self._slots.values()))

    def test_features(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Spread the samples as the test set is."""
        ref = self._put(params)
        ranges = pieces(len(rows), self._lanes())
        calls: list[Call] = [(i, "test_features", (ref, rows[a:b])) for i, (a, b) in enumerate(ranges)]
        return np.concatenate(self._gather(calls))

    def own_features(self, params: Params, positions: dict[int, np.ndarray]) -> np.ndarray:
        """Look at samples where they are; actors hold ascending runs of clients, so the order is that of clients."""
        ref = self._put(params)
        owned = [{i: positions[i] for i in group if i in positions} for group in self._layout.clients]
        calls: list[Call] = [(a, "own_features", (ref, own)) for a, own in enumerate(owned) if own]
        return np.concatenate(self._gather(calls))

    def save_clients(self, folder: str) -> None:
        """Have each actor write its own."""
        self._gather([(actor, "save_clients", (folder,)) for actor in range(len(self._actors))])

    def sees(self, folder: str) -> bool:
        """Ask each actor."""
        return all(self._gather([(actor, "sees", (folder,)) for actor in range(len(self._actors))]))

    def load_clients(self, folder: str, fix: str) -> None:
        """Have each actor read its own."""
        self._gather([(actor, "load_clients", (folder, fix)) for actor in range(len(self._actors))])

    def gallery(self, picks: list[Pick], init: str) -> list[Shown]:
        """Ask the owners."""
        owners = [self._actor_of[client_id] for client_id, _, _ in picks]
        calls: list[Call] = [(a, "gallery", ([pick], init)) for a, pick in zip(owners, picks, strict=True)]
        return [shown for (shown,) in self._gather(calls)]

    def storage_bytes(self) -> int:
        """Return what all clients store."""
        return sum(self._gather([(actor, "storage_bytes", ()) for actor in range(len(self._actors))]))


def _cause(error: RayError) -> str:
    """Say in one line whether the step raised, and what, or whether its actor was lost."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {_first_line(error.cause)}"
    return f"its actor was lost ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def _total(counts: list[Counts]) -> Counts:
    total = counts[0]
    for other in counts[1:]:
        total = total + other
    return total


@ray.remote(num_cpus=0, concurrency_groups={"watch": 1})  # type: ignore[call-overload]
class DriverActor:
    """Aggregates, schedules phases and writes the tables; the command line only watches it."""

    def __init__(self) -> None:
        self._events: deque[Progress] = deque()
        self._lock = threading.Lock()
        self._reported_s = 0.0

    def run(self, plan: Plan, run_dir: str, images: list[Any], pixels: Pixels) -> None:
        """Run the whole plan. ``images`` are references: training images never come into this process."""
        use_threads(plan.job.cluster.threads)
        executor = RayExecutor(plan, images, pixels)
        Experiment(plan, executor, Path(run_dir), self._emit).run()

    def _emit(self, event: Progress) -> None:
        now_s = time.monotonic()
        if event.row is None and event.round_number and now_s - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = now_s
        with self._lock:
            self._events.append(event)

    @ray.method(concurrency_group="watch")
    def events(self) -> list[Progress]:
        """Return what has happened since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events


def run_on_ray(
    plan: Plan, run_dir: Path, images: Images, emit: Callable[[Progress], None], check: Callable[[], None]
) -> None:
    """Start the driver actor on this node and watch it to its end; ``check`` may raise to stop it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    refs = [ray.put(array) for array in (images.train, images.test, images.test_labels)]
    cls: Any = DriverActor
    driver = cls.options(scheduling_strategy=here).remote()
    running = driver.run.remote(plan, str(run_dir.resolve()), refs, images.pixels)
    while True:
        done, _ = ray.wait([running], timeout=POLL_S)
        check()
        try:
            for event in ray.get(driver.events.remote()):
                emit(event)
            if done:
                ray.get(running)
                return
        except RayTaskError as error:
            if isinstance(error.cause, QdsimError):
                raise error.cause from None
            raise QdsimError(
                f"the driver failed with {type(error.cause).__name__}: {_first_line(error.cause)}"
            ) from error
        except RayError as error:
            raise QdsimError(f"the driver actor was lost: {_first_line(error)}") from error
