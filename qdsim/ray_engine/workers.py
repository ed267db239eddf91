"""The client actors at work: where each runs, how many calls its node takes at once, and how a lost one is replaced."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from qdsim.errors import CannotPlace, OtherDevice, UnusableGpu
from qdsim.experiment.progress import Notice, Step
from qdsim.experiment.sections import Cluster
from qdsim.models.device import DeviceInfo, join_devices
from qdsim.ray_engine import cluster
from qdsim.ray_engine.client_actor import ActorPlace
from qdsim.ray_engine.worker_group import WorkerGroup, listed

ACTOR_START_S = 30.0
"""Slowest start of one actor that is still believed: torch takes 2 to 3 s of a core to import."""
POLL_S = 1.0
Notify = Callable[[Notice | Step | DeviceInfo], None]
"""Takes what is to be known wherever the run is, and which devices its clients are on."""


class DevicesSeen:
    """The devices that a run has computed on so far, each once: of one kind, unless the job allows others."""

    def __init__(self, *, mixed: bool, notify: Callable[[DeviceInfo], None]):
        self._mixed, self._notify = mixed, notify
        self._seen: list[DeviceInfo] = []

    def take(self, places: Sequence[ActorPlace]) -> None:
        """Note where actors have started; refuse a device of another kind, whose bits would differ."""
        for place in places:
            if place.device in self._seen:
                continue
            found, before = place.device.fingerprint, self.fingerprint
            if self._seen and found != before and not self._mixed:
                raise OtherDevice(before, found, place.node_id[:8])
            self._seen.append(place.device)
            self._notify(place.device)

    @property
    def fingerprint(self) -> str:
        """What decides the bits; of several kinds all of them."""
        return join_devices(device.fingerprint for device in self._seen)


class Workers:
    """Every worker is a client actor; its number stays when its actor is replaced."""

    def __init__(self, wanted: Cluster, group: WorkerGroup, notify: Notify):
        self._wanted, self._group, self._notify = wanted, group, notify
        self.handles: list[Any] = group.actors
        self.clients = [list(clients) for clients in group.layout.clients]
        """Of each worker."""
        self._told: set[str] = set()
        """Notes of actors that have been passed on: those of many are alike."""
        self.places = self._wait_for_all()
        self._tell(range(len(self.handles)))
        self.devices = DevicesSeen(mixed=wanted.mixed_devices, notify=notify)
        self.devices.take(self.places)
        self.slots = self._count_slots()
        """How many calls may run at once on each node: as many as it has cores."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self.handles)

    def is_on_gpu(self, worker: int) -> bool:
        """Tell whether a worker computes on a GPU."""
        return self.places[worker].on_gpu

    def gpu_share(self, worker: int) -> float:
        """Return which share of a GPU a worker computes on, 0 on the CPU."""
        return self._group.layout.gpus if self.is_on_gpu(worker) else 0.0

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
                self._tell([worker])
                self.slots = self._count_slots()
                self.devices.take([self.places[worker]])
                prepare(worker)
                return
            except (RayTaskError, OtherDevice):
                raise
            except (RayError, CannotPlace) as error:
                if attempt == self._wanted.attempts:
                    raise
                if isinstance(error, UnusableGpu):  # the one that it had is lost; its place stays reserved
                    self._move_from(worker, error)

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

    def _move_from(self, worker: int, error: UnusableGpu) -> None:
        """Find another GPU for an actor; where there is none, what is wrong with its own is the reason to end."""
        try:
            self._group.reservation.move(worker, lambda text: self._notify(Notice(text)))
        except CannotPlace:
            raise error from None

    def _start_limit_s(self, actors: int) -> float:
        """Return how long actors may take to start."""
        return self._wanted.placement_timeout_s + 30 + ACTOR_START_S * actors

    def _wait_for_all(self) -> list[ActorPlace]:
        """Return where all run, once they have started; one that is lost meanwhile is replaced, as it is later on."""
        found: dict[int, ActorPlace] = {}
        for attempt in range(1, self._wanted.attempts + 1):
            waiting = [worker for worker in range(len(self)) if worker not in found]
            outcomes = self._outcomes([self.handles[worker] for worker in waiting])
            for worker, outcome in zip(waiting, outcomes, strict=True):
                if isinstance(outcome, ActorPlace):
                    found[worker] = outcome
                elif attempt == self._wanted.attempts:
                    raise _not_started(len(waiting), outcome) from outcome
                else:
                    said = f"the actor of clients {listed(self.clients[worker], ', ')} was lost as it started"
                    self._notify(Notice(f"{said} ({first_line(outcome)}); started again", actor_replaced=True))
                    self.handles[worker] = self._start_again(worker)
        return [found[worker] for worker in range(len(self))]

    def _wait_for(self, handles: list[Any]) -> list[ActorPlace]:
        """Return where actors run, once they have started."""
        places = []
        for outcome in self._outcomes(handles):
            if not isinstance(outcome, ActorPlace):
                raise _not_started(len(handles), outcome) from outcome
            places.append(outcome)
        return places

    def _outcomes(self, handles: list[Any]) -> list[ActorPlace | RayError]:
        """Wait until actors have started; return where each runs, or how it was lost."""
        refs = [handle.place.remote() for handle in handles]
        timeout_s = self._start_limit_s(len(refs))
        ready, late = self._started(refs, timeout_s)
        if late:
            found = f"{len(ready)} that started within {timeout_s:g} s"
            raise CannotPlace(f"{len(refs)} actors", found, "set cluster.clients_per_actor higher")
        outcomes: list[ActorPlace | RayError] = []
        for ref in refs:
            try:
                outcomes.append(ray.get(ref))
            except RayTaskError as error:
                if isinstance(error.cause, CannotPlace):  # it has a GPU that it cannot use
                    raise error.cause from None
                raise
            except RayError as error:
                outcomes.append(error)
        return outcomes

    def _tell(self, workers: Sequence[int]) -> None:
        """Pass on what is to be known of actors that have started, once: the notes of many are alike."""
        moved: dict[tuple[str, str], list[int]] = {}
        for worker in workers:
            place = self.places[worker]
            if place.instead_of:
                where = f"GPU {place.instead_of} of {self.where(worker)}"
                moved.setdefault((where, place.why), []).extend(self.clients[worker])
        notes = [
            f"clients {listed(sorted(clients), ', ')} run on the CPU instead of {where} (cluster.cpu_fallback): {why}"
            for (where, why), clients in moved.items()
        ]
        for note in [*notes, *(note for worker in workers for note in self.places[worker].notes)]:
            if note not in self._told:
                self._told.add(note)
                self._notify(Notice(note))

    def _started(self, refs: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        """Wait for actors and say how many have started; return those that have, and those that are late."""
        give_up_s = time.monotonic() + timeout_s
        ready: list[Any] = []
        while len(ready) < len(refs) and time.monotonic() < give_up_s:
            wanted = min(len(ready) + 1, len(refs))
            ready, _ = ray.wait(refs, num_returns=wanted, timeout=POLL_S)
            if len(refs) > 1:
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                self._notify(Step("starting client processes", len(ready), len(refs)))
        return ready, [ref for ref in refs if ref not in ready]

    def _count_slots(self) -> dict[str, int]:
        cores = {node.node_id: int(node.cpus) for node in cluster.nodes()}
        nodes = {place.node_id for place in self.places}
        return {node: max(1, cores.get(node, 1) // self._wanted.threads) for node in nodes}


def _not_started(actors: int, error: RayError) -> CannotPlace:
    fix = "look at Ray's logs of that node, or set cluster.clients_per_actor higher if it ran out of memory"
    return CannotPlace(f"{actors} actors", cause_of(error), fix)


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
