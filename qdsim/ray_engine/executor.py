"""Clients as Ray actors behind :class:`qdsim.federation.executor.Executor`.

Calls wait in one queue; no more run at once than there are cores or GPU slots. Nothing happens by itself: whoever waits
for a result has the queue worked off meanwhile.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from qdsim.algorithms.phase import ClientUpdate, RoundContext
from qdsim.errors import BadInput, CannotPlace, ClientFailed, OutOfMemory, StorageFailed
from qdsim.experiment.progress import Notice
from qdsim.experiment.sections import Cluster
from qdsim.federation.chaos import Chaos, Fault
from qdsim.federation.client_states import ClientStateStore
from qdsim.federation.executor import Call, Future
from qdsim.models import params as P
from qdsim.models.device import gpu_failure, memory_advice, memory_numbers
from qdsim.models.params import Params
from qdsim.ray_engine.failures import Decision, FailureKind, decide
from qdsim.ray_engine.worker_group import WorkerGroup
from qdsim.ray_engine.workers import POLL_S, CallTimeout, Notify, Workers, cause_of

SMALL_BYTES = 100_000
"""A model of this size goes along with each call: up to 100 KiB Ray sends what is passed as part of the message, which
takes a fifth less time than having every actor look it up in its node's store."""
PREPARE_S = 600.0
"""For giving a new actor its clients' shards and reading their states."""
TIMEOUT_FACTOR = 20.0
"""A step that takes so many times as long as the longest of its phase is taken to hang."""
LEAST_TIMEOUT_S = 600.0
UNKNOWN_TIMEOUT_S = 4 * 3600.0
"""For the first step of a phase, and for evaluation and the like."""
UNKNOWN_S = 1e-4
"""For a unit of work that has never been done."""


class RayFuture:
    """A call of an actor, from the queue to its result."""

    def __init__(self, executor: "RayExecutor", call: Call, worker: int, fault: Fault | None):
        self.call, self.worker, self.fault = call, worker, fault
        self.elapsed_s = 0.0
        self.attempts = 0
        """How often it was made and lost."""
        self.handle: Any = None
        """The actor that it was started on."""
        self.began_s = 0.0
        self._executor = executor
        self._callbacks: list[Callable[[], None]] = []
        self._value: list[Any] = []
        self.delta: Any = None
        """Of a step: the reference to its update, which stays in Ray's store until it is taken."""

    @property
    def is_done(self) -> bool:
        """Tell whether the result is there."""
        return bool(self._value)

    def set(self, value: Any, elapsed_s: float) -> None:
        """Take the result."""
        self._value, self.elapsed_s = [value], elapsed_s
        for callback in self._callbacks:
            callback()
        self._callbacks = []  # a step that is done again was counted

    def reset(self) -> None:
        """Forget the result: the call has to be made again."""
        self._value, self.delta = [], None

    def result(self) -> Any:
        """Wait for the result and hand it over."""
        self._executor.work_until(self)
        if self.delta is not None:
            packed = self._executor.fetch(self)
            update: ClientUpdate = self._value[0]
            update.delta, self.delta = P.unpack(packed), None  # nothing keeps it in Ray's store any longer
        return self._value.pop()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have a function called as soon as the result is there."""
        self._callbacks.append(callback)


class RayExecutor:
    """Clients as Ray actors, placed all at once."""

    overlaps = True

    def __init__(self, wanted: Cluster, group: WorkerGroup, chaos: Chaos, notify: Notify):
        self._wanted, self._chaos = wanted, chaos
        self._workers = Workers(wanted, group, notify)
        self._worker_of = {client: w for w, clients in enumerate(self._workers.clients) for client in clients}
        self.states = ClientStateStore()
        self._setup: tuple[str, tuple[Any, ...]] | None = None
        """The call that a new actor is given again."""
        self._queue: deque[RayFuture] = deque()
        self._running: dict[Any, RayFuture] = {}
        self._sent: tuple[Params | None, Any] = (None, None)
        self._unit_s: dict[tuple[Any, ...], float] = {}
        """What a unit of each kind of work took the last time."""
        self._longest_s: dict[str, float] = {}
        """The longest step so far, by phase."""
        if wanted.compile:
            self._compile(notify)

    @property
    def device(self) -> str:
        """The device that the clients have computed on so far, all of them where the job allows several."""
        return self._workers.devices.fingerprint

    @property
    def lanes(self) -> int:
        """How many calls run at once."""
        return self._workers.lanes

    def submit(self, call: Call) -> RayFuture:
        """Put a call into the queue; one that any worker may run is given to one when calls are started."""
        worker = -1 if call.client_id is None else self._worker_of[call.client_id]
        fault = None
        if call.step_of is not None and call.client_id is not None:
            ctx = call.step_of
            fault = self._chaos.due("client", ctx.phase, ctx.round_number, call.client_id)
        return self._enqueue(call, worker, fault)

    def broadcast(self, method: str, *arguments: Any, params: Params | None = None, setup: bool = False) -> list[Any]:
        """Have every actor make the call."""
        if setup:
            self._setup, self.states = None, ClientStateStore()
            arguments = tuple(ray.put(argument) for argument in arguments)  # once for all, and for actors to come
        futures = [self._enqueue(Call(method, arguments, params), w, None) for w in range(len(self._workers))]
        results = [future.result() for future in futures]
        if setup:
            self._setup = (method, arguments)
        return results

    def least_time_s(self, futures: Sequence[Future]) -> float:
        """Return the longest that a worker, or a node's cores together, were busy with these calls."""
        busy = [0.0] * len(self._workers)
        for future in futures:
            busy[future.worker] += future.elapsed_s
        of_node: dict[str, float] = defaultdict(float)
        for worker, seconds in enumerate(busy):
            if not self._workers.is_on_gpu(worker):
                of_node[self._workers.places[worker].node_id] += seconds
        shared = [seconds / self._workers.slots[node] for node, seconds in of_node.items()]
        return max([*busy, *shared])

    def work_until(self, future: RayFuture) -> None:
        """Start calls and take results until this call is done."""
        while not future.is_done:
            self._start_calls()
            self._take_results()

    def fetch(self, future: RayFuture) -> Any:
        """Fetch a step's update; if it was lost with its node after the step, the step is done again."""
        while True:
            try:
                return ray.get(future.delta)
            except RayError as error:
                if future.call.changes_state and future.call.client_id is not None:
                    self.states.discard(future.call.client_id)
                future.reset()
                self._handle_failure("update_lost", future, error)
                self.work_until(future)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _enqueue(self, call: Call, worker: int, fault: Fault | None) -> RayFuture:
        future = RayFuture(self, call, worker, fault)
        self._queue.append(future)
        return future

    def _start_calls(self) -> None:
        """Start the calls whose actor is free and has a core or GPU; the others keep their order."""
        if not self._queue:
            return
        self._share_out()
        busy = {future.worker for future in self._running.values()}
        used = Counter(self._workers.places[worker].node_id for worker in busy)
        for _ in range(len(self._queue)):
            future = self._queue.popleft()
            worker = future.worker
            node = self._workers.places[worker].node_id
            if worker in busy or (not self._workers.is_on_gpu(worker) and used[node] >= self._workers.slots[node]):
                self._queue.append(future)
                continue
            self._start(future)
            busy.add(worker)
            used[node] += 1

    def _share_out(self) -> None:
        """Give the calls that any worker may run to those that have the least to do."""
        if all(future.worker >= 0 for future in self._queue):
            return
        load = [0.0] * len(self._workers)
        for future in [*self._queue, *self._running.values()]:
            if future.worker >= 0:
                load[future.worker] += self._expected_s(future.call)
        for future in self._queue:
            if future.worker < 0:
                future.worker = load.index(min(load))
                load[future.worker] += self._expected_s(future.call)

    def _start(self, future: RayFuture) -> None:
        call, handle = future.call, self._workers.handles[future.worker]
        packed = None if call.params is None else self._put(call.params)
        if call.step_of is not None:
            save_to = (self.states.destination(),) if call.changes_state else ()
            first, future.delta = handle.step.remote(future.fault, packed, *call.arguments, *save_to)
        else:
            first = handle.call.remote(call.method, packed, *call.arguments)
        future.handle, future.began_s = handle, time.monotonic()
        self._running[first] = future

    def _put(self, params: Params) -> Any:
        """Return the global model as calls are given it: put into the store once, unless it is small."""
        if self._sent[0] is not params:
            packed = P.pack(params)
            self._sent = (params, packed if P.size_bytes(params) < SMALL_BYTES else ray.put(packed))
        return self._sent[1]

    def _take_results(self) -> None:
        """Wait for a call to end, and take its result or deal with its failure."""
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=POLL_S, fetch_local=False)
        late = [] if done else [ref for ref, future in self._running.items() if self._is_late(future)]
        for ref in done or late:
            future = self._running.pop(ref)
            if future.handle is not self._workers.handles[future.worker]:  # and its clients' states with it
                self._handle_failure("actor_replaced", future, None)
                continue
            if done:
                self._start_calls()  # nobody waits while this result is fetched
            try:
                if not done:
                    timeout_s = self._timeout_s(future.call.step_of)
                    raise CallTimeout(f"no answer for {timeout_s:.0f} s (cluster.step_timeout_s)")
                value, elapsed_s = ray.get(ref)
            except RayTaskError as error:
                self._handle_failure(gpu_failure(error.cause) or "raised", future, error)
            except CallTimeout as error:
                self._handle_failure("timed_out", future, error)
            except RayError as error:
                self._handle_failure("actor_lost", future, error)
            else:
                self._finish(future, value, elapsed_s)

    def _finish(self, future: RayFuture, value: Any, elapsed_s: float) -> None:
        call = future.call
        self._unit_s[_kind_of(call)] = elapsed_s / max(call.work, 1)
        if call.step_of is not None and call.client_id is not None:
            ctx = call.step_of
            self._longest_s[ctx.phase] = max(elapsed_s, self._longest_s.get(ctx.phase, 0.0))
            if call.changes_state:
                self.states.record(call.client_id, ctx)
        future.set(value, elapsed_s)

    def _expected_s(self, call: Call) -> float:
        """Return how long a call will take, as far as earlier ones tell."""
        known = self._unit_s.get(_kind_of(call))
        if known is None and call.step_of is not None:
            alike = [s for kind, s in self._unit_s.items() if kind[:2] == ("step", call.step_of.phase)]
            known = sum(alike) / len(alike) if alike else 1.0
        return call.work * (UNKNOWN_S if known is None else known)

    def _is_late(self, future: RayFuture) -> bool:
        return time.monotonic() - future.began_s > self._timeout_s(future.call.step_of)

    def _timeout_s(self, ctx: RoundContext | None) -> float:
        """Return how long a call may take: a step a setting, or many times the longest of its phase so far."""
        if ctx is None:
            return UNKNOWN_TIMEOUT_S
        if isinstance(self._wanted.step_timeout_s, float):
            return self._wanted.step_timeout_s
        longest_s = self._longest_s.get(ctx.phase)
        return UNKNOWN_TIMEOUT_S if longest_s is None else max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * longest_s)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _handle_failure(self, kind: FailureKind, future: RayFuture, error: Exception | None) -> None:
        """Do what the policy decides."""
        future.attempts += kind not in ("raised", "out_of_memory", "actor_replaced")
        decision = decide(kind, future.attempts, self._wanted.attempts)
        if decision is Decision.GIVE_UP:
            assert error is not None
            self._give_up(future.worker, future.call, error, future.attempts)
        if decision is Decision.REPLACE:
            assert error is not None
            self._replace(future.worker, cause_of(error))
        future.fault = None  # it has struck
        self._queue.appendleft(future)

    def _replace(self, worker: int, cause: str) -> None:
        restoring = Call("load_states")
        try:
            self._workers.replace(worker, cause, self._prepare)
        except RayTaskError as error:
            self._give_up(worker, restoring, error)
        except RayError as error:
            self._give_up(worker, restoring, error, self._wanted.attempts)

    def _prepare(self, worker: int) -> None:
        """Assign an actor's clients to it again, and have it read their states from where they were last written."""
        handle, clients = self._workers.handles[worker], self._workers.clients[worker]
        if self._setup is not None:
            method, arguments = self._setup
            ray.get(handle.call.remote(method, None, *arguments), timeout=PREPARE_S)
        if self.states.lost_with_actor:
            cause = (
                "its state was lost with its actor, since --out is not shared by all nodes: put it on shared storage"
            )
            raise ClientFailed(clients[0], "restoring", 0, self._workers.where(worker), cause)
        files = self.states.files(clients)
        if files:
            ray.get(handle.call.remote("load_states", None, files, "run the job again"), timeout=PREPARE_S)

    def _give_up(self, worker: int, call: Call, error: Exception, attempts: int = 1) -> NoReturn:
        """Stop the run: leaving a client out would change the result."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, BadInput | CannotPlace | StorageFailed):
            raise cause from None
        client_id = self._workers.clients[worker][0] if call.client_id is None else call.client_id
        phase, number = (call.step_of.phase, call.step_of.round_number) if call.step_of else (call.method, 0)
        where = self._workers.where(worker)
        if gpu_failure(cause) == "out_of_memory":
            numbers = memory_numbers(str(cause))
            fix = memory_advice(asdict(self._wanted), self._workers.gpu_share(worker))
            raise OutOfMemory(client_id, phase, number, where, numbers, fix) from error
        again = f"; given up after {attempts} attempts (cluster.attempts)" if attempts > 1 else ""
        raise ClientFailed(client_id, phase, number, where, cause_of(error) + again) from error

    def _compile(self, notify: Notify) -> None:
        """Have one actor of each node compile, and the others find it in the cache that they share."""
        if any(self._workers.is_on_gpu(worker) for worker in range(len(self._workers))):
            notify(Notice("cluster.compile does nothing on GPUs: their kernels are fused already"))
            return
        notify(Notice("compiling the steps (cluster.compile); the next run finds them in the compiler's cache"))
        first = self._workers.first_of_nodes()
        for workers in (first, [w for w in range(len(self._workers)) if w not in first]):
            for future in [self._enqueue(Call("warm_up"), worker, None) for worker in workers]:
                future.result()


def _kind_of(call: Call) -> tuple[Any, ...]:
    """Return what calls that take about the same time have in common."""
    if call.step_of is not None:
        return ("step", call.step_of.phase, call.client_id)
    return (call.method,)
