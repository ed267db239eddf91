"""The client actors at work: where each runs, how many calls its node takes at once, and how a lost one is replaced."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from qdsim.errors import CannotPlace
from qdsim.experiment.progress import Notice
from qdsim.experiment.sections import Cluster
from qdsim.ray_engine import cluster
from qdsim.ray_engine.client_actor import ActorPlace
from qdsim.ray_engine.worker_group import WorkerGroup, listed

ACTOR_START_S = 30.0
"""Slowest start of one actor that is still believed: torch takes 2 to 3 s of a core to import."""
POLL_S = 1.0


class Workers:
    """Every worker is a client actor; its number stays when its actor is replaced."""

    def __init__(self, wanted: Cluster, group: WorkerGroup, notify: Callable[[Notice], None]):
        self._wanted, self._group, self._notify = wanted, group, notify
        self.handles: list[Any] = group.actors
        self.clients = [list(clients) for clients in group.layout.clients]
        """Of each worker."""
        self.places = self._wait_for(self.handles)
        self.slots = self._count_slots()
        """How many calls may run at once on each node: as many as it has cores."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.handles)

    def is_on_gpu(self, worker: int) -> bool:
        """Tell whether a worker computes on a GPU."""
        return self.places[worker].device == "cuda"

    @property
    def lanes(self) -> int:
        """How many of them may compute at once."""
        if any(self.is_on_gpu(worker) for worker in range(len(self))):
            return len(self)
        return min(len(self), sum(self.slots.values()))

    def first_of_nodes(self) -> list[int]:
        """Return one worker of each node."""
        nodes = [place.node_id for place in self.places]
        return sorted({nodes.index(node) for node in nodes})

    def where(self, worker: int) -> str:
        """Say where a worker runs, or ran."""
        return f"node {self.places[worker].node_id[:8]}"

    def replace(self, worker: int, cause: str, prepare: Callable[[int], None]) -> None:
        """Start a lost actor anew, wherever there is room; ``prepare`` gives it back what it owned.

        Raises the last error where that fails as often as a step may be tried, and at once what ``prepare`` raises by
        itself.
        """
        clients = self.clients[worker]
        owner = f"the actor of clients {listed(clients, ', ')}" if len(clients) > 1 else f"client {clients[0]}"
        self._notify(Notice(f"{owner} on {self.where(worker)}: {cause}; started again", actor_replaced=True))
        for attempt in range(1, self._wanted.attempts + 1):
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self.handles[worker])
            try:
                self.handles[worker] = self._start_again(worker)
                (self.places[worker],) = self._wait_for([self.handles[worker]])
                self.slots = self._count_slots()
                prepare(worker)
                return
            except RayTaskError:
                raise
            except (RayError, CannotPlace):
                if attempt == self._wanted.attempts:
                    raise

    def _start_again(self, worker: int) -> Any:
        """Start an actor at its place, or at another if its node turns out to be gone: Ray takes a while to notice."""
        handle = self._group.start(worker)
        ready = handle.place.remote()
        give_up_s = time.monotonic() + self._start_limit_s(1)
        while not ray.wait([ready], timeout=POLL_S)[0]:
            if not self._group.reservation.is_alive(worker) or time.monotonic() > give_up_s:
                ray.kill(handle)
                self._group.reservation.move(worker, lambda text: self._notify(Notice(text)))
                return self._group.start(worker)
        return handle

    def _start_limit_s(self, actors: int) -> float:
        """Return how long actors may take to start."""
        return self._wanted.placement_timeout_s + 30 + ACTOR_START_S * actors

    def _wait_for(self, handles: list[Any]) -> list[ActorPlace]:
        """Return where actors run, once they have started."""
        refs = [handle.place.remote() for handle in handles]
        timeout_s = self._start_limit_s(len(refs))
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        if late:
            found = f"{len(ready)} that started within {timeout_s:g} s"
            raise CannotPlace(f"{len(refs)} actors", found, "set cluster.clients_per_actor higher")
        try:
            places: list[ActorPlace] = ray.get(refs)
        except RayError as error:
            fix = "look at Ray's logs of that node, or set cluster.clients_per_actor higher if it ran out of memory"
            raise CannotPlace(f"{len(refs)} actors", cause_of(error), fix) from error
        return places

    def _count_slots(self) -> dict[str, int]:
        cores = {node.node_id: int(node.cpus) for node in cluster.nodes()}
        nodes = {place.node_id for place in self.places}
        return {node: max(1, cores.get(node, 1) // self._wanted.threads) for node in nodes}


class CallTimeout(Exception):
    """A call did not return in time."""


def cause_of(error: Exception) -> str:
    """Say in one line whether the call raised, and what, or whether its actor was lost."""
    if isinstance(error, CallTimeout):
        return str(error)
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {first_line(error.cause)}"
    return f"its actor was lost ({type(error).__name__}: {first_line(error)})"


def first_line(error: BaseException) -> str:
    """Return an error's first line."""
    return str(error).splitlines()[0] if str(error) else ""
