"""The one interface behind which clients run: submit a call of a :class:`ClientHost`, or broadcast one to all hosts.

:class:`InlineExecutor` runs calls in this process, :class:`qdsim.ray_engine.executor.RayExecutor` as calls of actors;
they differ in nothing else. Everything that an experiment asks of its clients is a function over these two.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qdsim.algorithms.phase import ClientUpdate, RoundContext
from qdsim.errors import ClientFailed, StorageFailed
from qdsim.federation.client_host import ClientHost
from qdsim.federation.client_states import ClientStateStore
from qdsim.models.params import Params


@dataclass(frozen=True)
class Call:
    """One call of a method of :class:`ClientHost`."""

    method: str
    arguments: tuple[Any, ...] = ()
    params: Params | None = None
    """The global model, which the method takes first. However many calls carry it, it is sent once."""
    client_id: int | None = None
    """The client whose host runs it; None: any host."""
    work: float = 1.0
    """How much there is to do, in a unit of the method's own: what it took before tells what it will take."""
    step_of: RoundContext | None = None
    """Of a client step: the round it is part of."""
    changes_state: bool = False
    """Of a client step: it changes the client's synthetic set, and writes it where :class:`ClientStateStore` says."""


class Future(Protocol):
    """The result of a call, now or later."""

    worker: int
    """Which worker ran it."""
    elapsed_s: float
    """How long it took there."""

    def result(self) -> Any:
        """Wait for the result and hand it over: it can be taken once, so that nothing keeps it in memory."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have a function called as soon as the result is there."""


class Executor(Protocol):
    """Where clients live. The same numbers come back whatever stands behind it."""

    @property
    def device(self) -> str:
        """``cpu``, or the fingerprint of the GPUs (``models/device.py``): their bits differ."""

    @property
    def lanes(self) -> int:
        """How many calls run at once."""

    @property
    def overlaps(self) -> bool:
        """Calls run while this process does something else."""

    states: ClientStateStore
    """Where the clients' states can be read again."""

    def submit(self, call: Call) -> Future:
        """Have a call made; calls start in the order in which they are submitted."""

    def broadcast(self, method: str, *arguments: Any, params: Params | None = None, setup: bool = False) -> list[Any]:
        """Call a method of every host and return all results, in the order of workers.

        ``setup``: a host that replaces a lost one is given this call again, before the clients' states are read.
        """

    def least_time_s(self, futures: Sequence[Future]) -> float:
        """Return the least time that calls could take on the workers and cores there are."""


@dataclass
class Done:
    """The future of a call that has been made."""

    value: list[Any]
    elapsed_s: float
    worker: int = 0

    def result(self) -> Any:
        """Hand the value over."""
        return self.value.pop()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it now."""
        callback()


@dataclass
class InlineExecutor:
    """All clients in this process, one after the other: for debugging, and to compare Ray with."""

    host: ClientHost
    device: str = "cpu"
    lanes: int = 1
    overlaps: bool = False
    states: ClientStateStore = field(default_factory=ClientStateStore)

    def submit(self, call: Call) -> Done:
        """Make the call at once."""
        began_s = time.perf_counter()
        arguments = call.arguments if call.params is None else (call.params, *call.arguments)
        if call.changes_state:
            arguments = (*arguments, self.states.destination())
        try:
            found = getattr(self.host, call.method)(*arguments)
        except StorageFailed:
            raise
        except Exception as error:
            if call.step_of is None or call.client_id is None:
                raise
            cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ctx = call.step_of
            raise ClientFailed(call.client_id, ctx.phase, ctx.round_number, "this machine", cause) from error
        if call.changes_state and call.step_of is not None and call.client_id is not None:
            self.states.record(call.client_id, call.step_of)
        elapsed_s = found.step_s if isinstance(found, ClientUpdate) else time.perf_counter() - began_s
        return Done([found], elapsed_s)

    def broadcast(self, method: str, *arguments: Any, params: Params | None = None, setup: bool = False) -> list[Any]:
        """Call the one host."""
        if setup:
            self.states = ClientStateStore()
        return [getattr(self.host, method)(*(() if params is None else (params,)), *arguments)]

    def least_time_s(self, futures: Sequence[Future]) -> float:
        """Return their sum: nothing runs beside anything else."""
        return sum(future.elapsed_s for future in futures)
