"""Where a run is, for whoever watches it. Nothing here brings torch with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

Row = dict[str, Any]
Span = tuple[float, float, float]
"""Seconds: at the least, likely, at the most."""
MATCHED_COST = 3.0
"""A synthetic image in a matching step against a real one in a gradient, roughly: it is differentiated twice."""
MARKS = 10
"""Rounds that a rate is taken from: the last ones."""
SURE, UNSURE = 1.15, 1.6
"""By what a guess may be off: of rounds like those that were seen, and of others."""
ALIKE = 1.25
"""By what loads may differ whose rounds take about the same time."""
ENOUGH = 0.2
"""Of a round's clients, to tell from them how long it takes."""


@dataclass(frozen=True)
class Notice:
    """Something that the user should know, wherever the run is."""

    text: str
    actor_replaced: bool = False
    """It says that an actor was lost and started again."""


@dataclass(frozen=True)
class Step:
    """What a run is doing where no round tells: reading data, starting processes."""

    text: str
    done: int = 0
    total: int = 0
    """Where there is something to count: so many are done of so many."""

    def __str__(self) -> str:
        """Return it with its count."""
        return f"{self.text}, {self.done}/{self.total}" if self.total else self.text


@dataclass(frozen=True)
class Left:
    """How long the rest of a run takes."""

    low_s: float
    likely_s: float
    high_s: float


@dataclass(frozen=True)
class Progress:
    """Where the run is: sent at every round and as clients finish."""

    task: int
    """Position in the plan's tasks; -1 while a federation trains."""
    cell: str
    seed: int
    method: str
    request: str
    phase: str
    round_number: int
    rounds: int
    clients_done: int
    clients: int
    share_done: float
    """Of the work that the plan expects."""
    row: Row | None = field(default=None, repr=False)
    """The finished round's row of the table ``rounds``; with ``finished`` the last one before relearning."""
    phase_ended: bool = False
    """The row is the phase's last."""
    finished: bool = False
    """The task is done, or the training was found ready."""
    left: Left | None = None
    """How long the rest takes; None where nothing is known yet."""
    reused_from: str = ""
    """With ``finished``: the cell of the sweep whose result this one's is, and that computed it."""

    @property
    def whose(self) -> tuple[Any, ...]:
        """The phase that this is of: a score is shown beside its own phase alone."""
        return self.cell, self.seed, self.method, self.request, self.phase


Event = Progress | Notice | Step


@dataclass(frozen=True)
class Load:
    """What a phase has to do. Plain and matched are in a unit of their own: its price in seconds is learned."""

    kind: str
    """The phase's name."""
    rounds: int
    plain: float
    """Of a round: samples in gradients, over all participants, times the network's operations."""
    matched: float
    """Of a round: synthetic images matched, likewise."""
    clients: int
    """Participants of a round."""
    after: float = 0.0
    """Once, at the end of the phase, in the unit of ``plain``."""
    saves: bool = False
    """Each client's state is written in its step."""
    may_end: bool = False
    """A rule may end it before its last round."""

    @property
    def work(self) -> float:
        """All of it as one number, before anything is measured."""
        return self.rounds * (self.plain + MATCHED_COST * self.matched) + self.after

    @property
    def size(self) -> tuple[str, float, float, int]:
        """What a round's duration depends on."""
        return self.kind, self.plain, self.matched, self.clients

    def is_like(self, other: Load) -> bool:
        """Tell whether a round of the other takes about the same time."""
        pairs = ((self.plain, other.plain), (self.matched, other.matched), (self.clients, other.clients))
        return self.kind == other.kind and all(max(pair) <= ALIKE * min(pair) for pair in pairs)


class Pace:
    """How long the rest of a run takes, learned while it goes on.

    The running phase goes by its own clock: what its rounds took so far. For a phase to come that is like one that is
    over, that one's rounds count. For any other, a round is the time of its steps (so many samples, at the price that
    samples had so far) and the time beside them (evaluation, rows, commits), which was seen as well.
    """

    def __init__(self, loads: Mapping[Any, Load], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ahead = dict(loads)
        """Phases that are not over."""
        self._work = sum(load.work for load in loads.values())
        """Of the phases that are not over."""
        self._total = max(self._work, 1.0)
        self._known: dict[tuple[str, float, float, int], tuple[Load, float]] = {}
        """Phases that are over, with the seconds of a round; of those of one size the last."""
        self._alike: dict[tuple[str, float, float, int], float | None] = {}
        """For sizes that were asked for: the seconds of a round of the last phase that was like it."""
        self._to_come: Span | None = None
        """What the phases take that have not begun, until something new is known of them."""
        self._is_summed = False
        self._prices = _Prices()
        self._now: Any = None
        self._done = 0.0
        """Rounds of the running phase that are over."""
        self._share = 0.0
        """Of the clients of its round."""
        self._marks: list[float] = []
        """When its last rounds ended, after when it began."""

    @property
    def share_done(self) -> float:
        """Of the work that the plan expects."""
        left = self._work
        load: Load | None = self._ahead.get(self._now)
        if load is not None:
            left -= load.work * min(1.0, self._done / max(load.rounds, 1))
        share: float = 1 - left / self._total
        return min(1.0, max(0.0, share))

    def begin(self, key: Any, load: Load, rounds_done: int = 0) -> None:
        """Hear that a phase begins; after a resume some of its rounds are done."""
        planned = self._ahead.get(key)
        self._work += load.work - (planned.work if planned is not None else 0.0)
        self._ahead[key] = load
        self._now, self._done, self._share, self._marks = key, rounds_done, 0.0, [self._clock()]
        self._is_summed = False

    def clients(self, done: int, expected: int) -> None:
        """Hear how many clients of a round have finished."""
        self._share = done / max(expected, 1)

    def round_over(self, compute_s: float, matching_s: float, busy_s: float, saving: float = 0.0) -> None:
        """Hear that a round is over, what its clients computed in all, and how long its steps took side by side.

        ``saving`` is the share of the steps' time that went into writing the clients' states.
        """
        load = self._ahead[self._now]
        self._done += 1
        self._share = 0.0
        self._marks = [*self._marks[-MARKS:], self._clock()]
        beside_s = max(0.0, self._marks[-1] - self._marks[-2] - busy_s)
        self._prices.learn(load, compute_s - matching_s, matching_s, (1 - saving) * busy_s, beside_s)
        if load.saves:
            self._prices.saving_s = saving * busy_s / max(load.clients, 1)
        self._is_summed = False

    def end(self, key: Any) -> None:
        """Hear that a phase is over, or that it need not run."""
        load = self._ahead.pop(key, None)
        if key == self._now:
            if load is not None and len(self._marks) > 1:
                self._learn(load, self._round_s())
            self._now = None
        if load is not None:
            self._work = self._work - load.work if self._ahead else 0.0
            self._is_summed = False

    def left(self) -> Left | None:
        """Guess the time left; None where nothing is known yet."""
        if not self._prices.rounds and self._now is None:
            return None
        now, to_come = self._left_now(), self._left_to_come()
        if now is None or to_come is None:
            return None
        return Left(*(a + b for a, b in zip(now, to_come, strict=True)))

    def _left_to_come(self) -> Span | None:
        """Return what the phases take that have not begun; worked out once a round, and not for every client."""
        if not self._is_summed:
            loads = Counter(load for key, load in self._ahead.items() if key != self._now)
            ends = [(count, self._left_in(load)) for load, count in loads.items()]
            known = [[count * each for each in end] for count, end in ends if end is not None]
            low, likely, high = (sum(end[i] for end in known) for i in range(3))
            self._to_come = (low, likely, high) if len(known) == len(ends) else None
            self._is_summed = True
        return self._to_come

    def _learn(self, load: Load, round_s: float) -> None:
        """Note what a round of a phase took that is over."""
        self._known.pop(load.size, None)  # the last comes last
        self._known[load.size] = (load, round_s)
        for size in self._alike:
            if load.is_like(Load(size[0], 1, *size[1:])):
                self._alike[size] = round_s

    def _known_round_s(self, load: Load) -> float | None:
        """Return what a round took of the last phase that was like this one; None where none was."""
        if load.size not in self._alike:
            found = (seconds for other, seconds in reversed(self._known.values()) if other.is_like(load))
            self._alike[load.size] = next(found, None)
        return self._alike[load.size]

    def _round_s(self) -> float:
        """Return what a round of the running phase takes: the mean of the last ones."""
        return (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)

    def _left_now(self) -> Span | None:
        load = self._ahead.get(self._now)
        if load is None:
            return (0.0, 0.0, 0.0)
        since_s = self._clock() - self._marks[-1]
        rounds = load.rounds - self._done
        if len(self._marks) > 1:
            likely = rounds * self._round_s()
            span = (likely / SURE, likely, likely * SURE)
        elif self._share >= ENOUGH:  # of a first round, by the clients that have finished
            likely = rounds * since_s / self._share
            span = (likely / UNSURE, likely, likely * UNSURE)
        else:
            found = self._left_in(replace(load, rounds=int(rounds)))
            if found is None:
                return None
            span = found
        least = min(1.0, rounds) / max(rounds, 1) if load.may_end else 1.0
        low, likely, high = (max(0.0, end - min(since_s, 0.9 * end / max(rounds, 1))) for end in span)
        return (low * least, likely, high)

    def _left_in(self, load: Load) -> Span | None:
        """Return what a phase takes that has not begun."""
        known = self._known_round_s(load)
        if known is not None:
            span = (known / SURE, known, known * SURE)
        else:
            found = self._prices.round_s(load)
            if found is None:
                return None
            span = found
        after = self._prices.plain_s * load.after
        low, likely, high = (load.rounds * end + after for end in span)
        return (low / max(load.rounds, 1) if load.may_end else low, likely, high)


class _Prices:
    """What samples cost so far, and what rounds cost beside their steps."""

    def __init__(self) -> None:
        self.rounds = 0
        self._plain = [0.0, 0.0]
        """Seconds, and units."""
        self._matched = [0.0, 0.0]
        self._busy_s = 0.0
        self.saving_s = 0.0
        """Of a client's state, in the last round that wrote any."""
        self._beside: list[tuple[float, int]] = []
        """Of the last rounds: seconds, and participants."""
        self._usual_beside = (0.0, 0.0)
        """Their medians."""

    def learn(self, load: Load, plain_s: float, matched_s: float, busy_s: float, beside_s: float) -> None:
        """Take a round in."""
        self.rounds += 1
        for known, seconds, amount in ((self._plain, plain_s, load.plain), (self._matched, matched_s, load.matched)):
            if amount:
                known[0] += seconds
                known[1] += amount
        self._busy_s += busy_s
        self._beside = [*self._beside[-MARKS:], (beside_s, load.clients)]
        self._usual_beside = (
            median(seconds for seconds, _ in self._beside),
            median(count for _, count in self._beside),
        )

    @property
    def _side_by_side(self) -> float:
        """Return how many seconds of computing go into one of waiting: lanes, less what others take of the machine."""
        compute_s = self._plain[0] + self._matched[0]
        return compute_s / self._busy_s if self._busy_s and compute_s else 1.0

    @property
    def plain_s(self) -> float:
        """Return the seconds of a unit, all lanes together."""
        return self._plain[0] / self._plain[1] / self._side_by_side if self._plain[1] else 0.0

    @property
    def _matched_s(self) -> float:
        seconds, amount = self._matched
        return seconds / amount / self._side_by_side if amount else MATCHED_COST * self.plain_s

    def round_s(self, load: Load) -> Span | None:
        """Return what a round of a load that was not seen takes; None before any was."""
        if not self._beside:
            return None
        steps_s = self.plain_s * load.plain + self._matched_s * load.matched
        steps_s += self.saving_s * load.clients if load.saves else 0.0
        beside_s, clients = self._usual_beside
        more = load.clients / max(clients, 1)
        ends = (beside_s * min(1.0, more), beside_s * (1 + more) / 2, beside_s * max(1.0, more))
        return (steps_s / UNSURE + ends[0], steps_s + ends[1], steps_s * UNSURE + ends[2])
