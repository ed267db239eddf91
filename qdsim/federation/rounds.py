"""The round loop: submit the steps, commit the round before while they run, aggregate in order, evaluate."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qdsim.algorithms import server
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import ClientUpdate, Phase, RoundContext
from qdsim.errors import BadInput
from qdsim.federation.evaluation import PendingEvaluation
from qdsim.federation.executor import Call, Executor, Future
from qdsim.models import params as P
from qdsim.models.params import Params


@dataclass
class Round:
    """What one round did."""

    number: int
    params: Params
    server_state: Params
    """What the server's rule remembers after it."""
    updates: list[ClientUpdate]
    """Without their deltas: these are gone once they are summed."""
    expected: int
    bytes_down: int
    wall_s: float
    """From the choice of participants to the new model, without what evaluation beside it has added."""
    wait_s: float
    busy_s: float
    aggregation_s: float
    evaluation: PendingEvaluation | None = None


class Observer(Protocol):
    """What happens around the rounds of a phase: evaluation, rows, commits, progress."""

    def progress(self, round_number: int, expected: int, done: int) -> None:
        """Hear that a round has begun, and whenever one of its clients has finished."""

    def evaluate(self, params: Params) -> PendingEvaluation | None:
        """Have a new global model evaluated; it may run beside the next round's steps."""

    def commit(self, finished: Round) -> bool:
        """Write what a round was, once it is evaluated; tell whether the phase's rule ends it here."""


def run_phase(
    phase: Phase,
    params: Params,
    sizes: np.ndarray,
    executor: Executor,
    observer: Observer,
    *,
    run_seed: int,
    request: str = "",
    first_round: int = 1,
    server_state: Params | None = None,
    history: History | None = None,
) -> Params:
    """Run the rounds of a phase and return the global model; ``sizes`` are the |Z_i|, ``request`` is its label.

    ``server_state`` is what the server's rule remembers of the rounds before the first; ``history`` records the
    updates. A round's evaluation and commit overlap the next round's steps, unless a rule may end the phase first or
    nothing here can overlap.
    """
    pending: Round | None = None
    state = server_state or {}
    for number in range(first_round, phase.stage.rounds + 1):
        began_s = time.perf_counter()
        ctx = RoundContext(run_seed, request, phase.name, number)
        participants = phase.select(sizes, ctx)
        observer.progress(number, len(participants), 0)
        counter = _StepCounter(observer, number, len(participants))
        steps: dict[int, Future] = {}
        # where steps run side by side, the largest first: else all would wait for one at the end
        for i in sorted(participants, key=lambda i: -sizes[i]) if executor.overlaps else participants:
            call = Call("step", (phase.client_step, i, ctx), params, i, step_of=ctx, changes_state=phase.learns)
            steps[i] = executor.submit(call)
            steps[i].when_done(counter)
        beside = pending.evaluation.futures if pending and pending.evaluation else []
        if pending:
            observer.commit(pending)  # the clients are at work meanwhile
        committed_s = time.perf_counter()
        updates = _Updates(participants, steps, ctx, history)
        proposed = phase.server_step(params, iter(updates), ctx)
        if not isinstance(proposed, dict) or proposed.keys() != params.keys():
            wanted = "a server step returns the model's parameters, all of them and no other"
            raise BadInput(f"{phase.name}.server_step", type(proposed).__name__, wanted)
        params, state = server.step(phase.server, params, proposed, state)
        ended_s = time.perf_counter()
        busy_s = executor.least_time_s([*steps.values()])
        added_s = executor.least_time_s([*steps.values(), *beside]) - busy_s
        pending = Round(
            number=number,
            params=params,
            server_state=state,
            updates=updates.kept,
            expected=len(participants),
            bytes_down=len(participants) * P.size_bytes(params),
            wall_s=ended_s - began_s - added_s,
            wait_s=committed_s - began_s + updates.wait_s,
            busy_s=busy_s,
            aggregation_s=max(0.0, ended_s - committed_s - updates.wait_s),
            evaluation=observer.evaluate(params),
        )
        if phase.ends_by is not None or not executor.overlaps:
            if observer.commit(pending):
                return params
            pending = None
    if pending:
        observer.commit(pending)
    return params


@dataclass
class _StepCounter:
    """Counts a round's steps as they end, and tells the observer."""

    observer: Observer
    round_number: int
    expected: int
    done: int = 0

    def __call__(self) -> None:
        self.done += 1
        self.observer.progress(self.round_number, self.expected, self.done)


class _Updates:
    """A round's updates in the order of client numbers; each is kept without its delta, to have one at a time."""

    def __init__(self, participants: list[int], steps: dict[int, Future], ctx: RoundContext, history: History | None):
        self._participants, self._steps, self._ctx, self._history = participants, steps, ctx, history
        self.kept: list[ClientUpdate] = []
        self.wait_s = 0.0
        """Time spent waiting for them."""

    def __iter__(self) -> Iterator[ClientUpdate]:
        for client_id in self._participants:
            began_s = time.perf_counter()
            update: ClientUpdate = self._steps[client_id].result()
            self.wait_s += time.perf_counter() - began_s
            update.bytes_up = P.size_bytes(update.delta)
            if self._history is not None:
                self._history.record(self._ctx.round_number, client_id, update.num_samples, update.delta)
            yield update
            update.delta = {}
            self.kept.append(update)
