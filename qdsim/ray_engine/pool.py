"""The client actors at work: no more at once than cores or GPU slots, replaced when they are lost."""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from qdsim.algorithms.phase import Assignment
from qdsim.errors import BadInput, CannotPlace, ClientFailed, StorageFailed
from qdsim.experiment.sections import Cluster
from qdsim.federation.client_host import Keep, tag
from qdsim.ray_engine import cluster
from qdsim.ray_engine.worker_group import Crew, listed
from qdsim.store.storage import Folder

ACTOR_START_S = 30.0
"""Slowest start of one actor that is still believed: torch takes 2 to 3 s of a core to import."""
GIVE_BACK_S = 600.0
"""For reading states back into a new actor."""
POLL_S = 1.0
PATIENCE = 20.0
"""A step that takes so many times as long as the longest of its phase is taken to hang."""
LEAST_PATIENCE_S = 600.0
UNKNOWN_PATIENCE_S = 4 * 3600.0
"""For the first step of a phase, and for evaluation and the like."""

Call = tuple[int, str, tuple[Any, ...]]
"""Actor, method, arguments."""


class StepTimeout(Exception):
    """A call did not return in time."""


@dataclass(frozen=True)
class _Running:
    index: int
    actor: int
    handle: Any
    refs: Any
    began_s: float


@dataclass
class Home:
    """Where the states of clients are found again, should their actor be lost."""

    base: Folder | None = None
    """The folder of a stored training, which was loaded first."""
    folder: Folder | None = None
    """While synthetic sets change: the folder into which their owners write them."""
    tags: dict[int, str] = field(default_factory=dict)
    """The last written state of each client that has taken part, before the round in hand."""
    now: str = ""
    """The tag of the round in hand."""
    finished: set[int] = field(default_factory=set)
    """Clients whose step of this round is done and written."""
    nowhere: bool = False
    """States have changed, and no folder is seen by all nodes."""

    def at_round(self, keep: Keep, names: Assignment) -> "Home":
        """Return what holds in a round whose step writes states to ``keep``, changes none (None) or keeps none."""
        if keep is None:
            return self
        if keep == "nowhere":
            return Home(nowhere=True)
        return Home(self.base, keep, self.reached(), tag(names.phase, names.round_number))

    def finish(self, client_id: int) -> None:
        """Take note that a client's step is done, and its state written if it has changed."""
        if self.now:
            self.finished.add(client_id)

    def reached(self) -> dict[int, str]:
        """Return the tag of each client's newest state."""
        return self.tags | dict.fromkeys(self.finished, self.now)


class ActorPool:
    """Every client's actor, and the calls to them."""

    def __init__(self, wanted: Cluster, crew: Crew, note: Callable[[str], None]):
        self._wanted, self._crew, self._note = wanted, crew, note
        self.clients: list[list[int]] = [list(group) for group in crew.layout.clients]
        """Of each actor."""
        self.wait_s = 0.0
        """Time spent waiting for calls."""
        self._actors = crew.actors
        places = self._wait_for(self._actors)
        self.nodes, self.on_gpu = [node for node, _, _ in places], [kind == "cuda" for _, _, kind in places]
        self.slots = self._count_slots()
        self.adopted: list[Call] = []
        """What each actor was last given."""
        self.home = Home()
        self.longest_s: dict[str, float] = {}
        """The longest step so far, by phase."""
        if self._wanted.compile:
            self._warm_up()

    def _warm_up(self) -> None:
        """Have one actor of each node compile, and the others find it in the cache that they share."""
        first = {self.nodes.index(node) for node in self.nodes}
        self._note("compiling the steps (cluster.compile); the next run finds them in the compiler's cache")
        self.gather([(actor, "warm_up", ()) for actor in sorted(first)])
        self.gather([(actor, "warm_up", ()) for actor in range(len(self.nodes)) if actor not in first])

    def _start_again(self, actor: int) -> Any:
        """Start an actor at its place, or at another if its node turns out to be gone: Ray takes a while to notice."""
        handle = self._crew.start(actor)
        ready = handle.describe.remote()
        give_up_s = time.monotonic() + self._start_limit_s(1)
        while not ray.wait([ready], timeout=POLL_S)[0]:
            if not self._crew.room.stands(actor) or time.monotonic() > give_up_s:
                ray.kill(handle)
                self._crew.room.move(actor, self._note)
                return self._crew.start(actor)
        return handle

    def _start_limit_s(self, actors: int) -> float:
        """Return how long actors may take to start."""
        return self._wanted.placement_timeout_s + 30 + ACTOR_START_S * actors

    def _wait_for(self, actors: list[Any]) -> list[tuple[str, str, str]]:
        """Return node, GPU and device of actors once they have started."""
        refs = [actor.describe.remote() for actor in actors]
        timeout_s = self._start_limit_s(len(refs))
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        if late:
            found = f"{len(ready)} that started within {timeout_s:g} s"
            raise CannotPlace(f"{len(refs)} actors", found, "set cluster.clients_per_actor higher")
        try:
            places: list[tuple[str, str, str]] = ray.get(refs)
        except RayError as error:
            fix = "look at Ray's logs of that node, or set cluster.clients_per_actor higher if it ran out of memory"
            raise CannotPlace(f"{len(refs)} actors", cause_of(error), fix) from error
        return places

    def _count_slots(self) -> dict[str, int]:
        """Return how many calls may run at once on each node: as many as it has cores."""
        cores = {node.node_id: int(node.cpus) for node in cluster.nodes()}
        return {node: max(1, cores.get(node, 1) // self._wanted.threads) for node in set(self.nodes)}

    def dispatch(self, calls: list[Call], names: Assignment | None = None) -> Iterator[tuple[int, Any, Any]]:
        """Start calls in order, no more at once than cores or GPU slots; yield each with its first result and refs.

        A call whose actor is lost is made again on a new one, ``cluster.attempts`` times in all. One that raised is
        not: it would raise again.
        """
        waiting = deque(enumerate(calls))
        running: dict[Any, _Running] = {}
        attempts = [0] * len(calls)
        while waiting or running:
            self._start_some(waiting, running)
            began_s = time.perf_counter()
            done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S, fetch_local=False)
            self.wait_s += time.perf_counter() - began_s
            limit_s = self._limit_s(names)
            hung = [ref for ref, run in running.items() if time.monotonic() - run.began_s > limit_s]
            for ref in done or hung:
                run = running.pop(ref)
                if run.handle is not self._actors[run.actor]:  # replaced meanwhile, and its clients' states with it
                    waiting.appendleft((run.index, undisturbed(calls[run.index])))
                    continue
                if done:
                    self._start_some(waiting, running)  # nobody waits while this result is fetched and dealt with
                try:
                    if not done:
                        raise StepTimeout(f"no answer for {limit_s:.0f} s (cluster.step_timeout_s)")
                    result = ray.get(ref)
                except RayTaskError as error:
                    self._give_up(run.actor, calls[run.index], names, error)
                except (RayError, StepTimeout) as error:
                    attempts[run.index] += 1
                    if attempts[run.index] >= self._wanted.attempts:
                        self._give_up(run.actor, calls[run.index], names, error, attempts[run.index])
                    self.replace(run.actor, cause_of(error))
                    waiting.appendleft((run.index, undisturbed(calls[run.index])))
                    continue
                yield run.index, result, run.refs

    def _start_some(self, waiting: deque[tuple[int, Call]], running: dict[Any, _Running]) -> None:
        """Start the calls whose actor is free and has a core or GPU; the others keep their order."""
        busy = {run.actor for run in running.values()}
        used = Counter(self.nodes[actor] for actor in busy)
        for _ in range(len(waiting)):
            index, (actor, method, arguments) = waiting.popleft()
            node = self.nodes[actor]
            if actor in busy or (not self.on_gpu[actor] and used[node] >= self.slots[node]):
                waiting.append((index, (actor, method, arguments)))
                continue
            refs = getattr(self._actors[actor], method).remote(*arguments)
            first = refs[0] if isinstance(refs, list) else refs
            running[first] = _Running(index, actor, self._actors[actor], refs, time.monotonic())
            busy.add(actor)
            used[node] += 1

    def _limit_s(self, names: Assignment | None) -> float:
        """Return how long a call may take: a step a setting, or many times the longest of its phase so far."""
        if names is None:
            return UNKNOWN_PATIENCE_S
        if isinstance(self._wanted.step_timeout_s, float):
            return self._wanted.step_timeout_s
        longest_s = self.longest_s.get(names.phase)
        return UNKNOWN_PATIENCE_S if longest_s is None else max(LEAST_PATIENCE_S, PATIENCE * longest_s)

    def _give_up(
        self, actor: int, call: Call, names: Assignment | None, error: Exception, attempts: int = 1
    ) -> NoReturn:
        """Stop the run: leaving a client out would change the result."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, BadInput | StorageFailed):
            raise cause from None
        _, method, arguments = call
        client_id = arguments[2] if method == "step" else self.clients[actor][0]
        phase, number = (names.phase, names.round_number) if names else (method, 0)
        again = f"; given up after {attempts} attempts (cluster.attempts)" if attempts > 1 else ""
        raise ClientFailed(client_id, phase, number, self._where(actor), cause_of(error) + again) from error

    def replace(self, actor: int, cause: str) -> None:
        """Start a lost actor anew, wherever there is room, and give it back what it owned."""
        clients = self.clients[actor]
        owner = f"the actor of clients {listed(clients, ', ')}" if len(clients) > 1 else f"client {clients[0]}"
        self._note(f"{owner} on {self._where(actor)}: {cause}; started again")
        for _ in range(self._wanted.attempts):
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actors[actor])
            try:
                self._actors[actor] = self._start_again(actor)
                node, _, kind = self._wait_for([self._actors[actor]])[0]
                self.nodes[actor], self.on_gpu[actor] = node, kind == "cuda"
                self.slots = self._count_slots()
                self._give_back(actor)
                return
            except RayTaskError as error:
                self._give_up(actor, (actor, "restore", ()), None, error)
            except (RayError, CannotPlace) as error:
                last = error
        if isinstance(last, CannotPlace):
            raise last
        self._give_up(actor, (actor, "restore", ()), None, last, self._wanted.attempts)

    def _give_back(self, actor: int) -> None:
        """Adopt the actor's clients again, and restore their states from where they were last written."""
        handle, home = self._actors[actor], self.home
        own = [call for call in self.adopted if call[0] == actor]
        for _, method, arguments in own:
            ray.get(getattr(handle, method).remote(*arguments), timeout=GIVE_BACK_S)
        clients = self.clients[actor]
        if home.nowhere:
            cause = (
                "its state was lost with its actor, since not all nodes see --out: put it on storage that they share"
            )
            raise ClientFailed(clients[0], "restoring", 0, self._where(actor), cause)
        if home.base:
            ray.get(handle.load_clients.remote(home.base, "run the job again"), timeout=GIVE_BACK_S)
        reached = {i: last for i, last in home.reached().items() if i in clients}
        if reached:
            ray.get(handle.restore.remote(home.folder, reached), timeout=GIVE_BACK_S)

    def gather(self, calls: list[Call]) -> list[Any]:
        """Make calls and return their results in order."""
        results: list[Any] = [None] * len(calls)
        for index, result, _ in self.dispatch(calls):
            results[index] = result
        return results

    def _where(self, actor: int) -> str:
        return f"node {self.nodes[actor][:8]}"


def undisturbed(call: Call) -> Call:
    """Return a call without the fault that came with it."""
    actor, method, arguments = call
    return (actor, method, (*arguments[:-1], None)) if method == "step" else call


def cause_of(error: Exception) -> str:
    """Say in one line whether the step raised, and what, or whether its actor was lost."""
    if isinstance(error, StepTimeout):
        return str(error)
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {first_line(error.cause)}"
    return f"its actor was lost ({type(error).__name__}: {first_line(error)})"


def first_line(error: BaseException) -> str:
    """Return an error's first line."""
    return str(error).splitlines()[0] if str(error) else ""
