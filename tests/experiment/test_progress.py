"""The time left, learned from rounds whose durations are made up here."""

import pytest

from qdsim.experiment.progress import Left, Load, Pace
from tests.time_left import Told, worst


class Clock:
    """A clock that stands until it is told to go on."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def rounds(pace, clock, count, seconds, busy_s, compute_s, matching_s=0.0):
    """Let rounds of these durations go by."""
    for _ in range(count):
        clock.now_s += seconds
        pace.round_over(compute_s, matching_s, busy_s)


TRAIN = Load("train", 20, plain=1000.0, matched=500.0, clients=10)
FINETUNE = Load("finetune", 1, plain=50_000.0, matched=10_000.0, clients=10)


def test_a_phase_to_come_is_priced_by_what_its_samples_cost():
    """A round of 2 s: 1.5 s of steps on two lanes, which computed 1 s on 1,000 samples and 2 s on 500 images.

    Of a sample 1 ms, of an image 4 ms, halved. Fine-tuning: 50 s and 40 s, halved, and the half second beside: 45.5 s.
    By samples alone it would be 50,000 + 3 × 10,000 against 2,500, 32 rounds, 64 s.
    """
    clock = Clock()
    pace = Pace({"train": TRAIN, "finetune": FINETUNE}, clock)
    assert pace.left() is None
    pace.begin("train", TRAIN)
    rounds(pace, clock, 10, 2.0, 1.5, 3.0, 2.0)
    left = pace.left()
    assert left is not None
    assert left.likely_s == pytest.approx(10 * 2.0 + 45.5)
    assert left.low_s < left.likely_s < left.high_s
    rounds(pace, clock, 10, 2.0, 1.5, 3.0, 2.0)
    pace.end("train")
    assert pace.left().likely_s == pytest.approx(45.5)


def test_writing_the_clients_states_is_no_price_of_samples():
    """4 s of steps: 3 s write the states of ten clients, 1 s goes into 1,000 samples. Retraining writes none: 1 s."""
    clock = Clock()
    train = Load("train", 20, plain=1000.0, matched=0.0, clients=10, saves=True)
    retrain, finetune = Load("unlearn", 1, 1000.0, 0.0, 10), Load("finetune", 1, 1000.0, 0.0, 20, saves=True)
    for later, expected_s in ((retrain, 1.0), (finetune, 7.0)):
        pace = Pace({"train": train, "later": later}, clock)
        pace.begin("train", train)
        for _ in range(20):
            clock.now_s += 4.0
            pace.round_over(1.0, 0.0, 4.0, saving=0.75)
        pace.end("train")
        assert pace.left().likely_s == pytest.approx(expected_s)


def test_a_running_phase_goes_by_its_own_clock():
    """Rounds of 2 s, then a phase whose rounds take 0.1 s: four of ten over, 0.6 s are left, whatever was before."""
    clock = Clock()
    quick = Load("recover", 10, plain=1000.0, matched=0.0, clients=10)
    pace = Pace({"train": TRAIN, "recover": quick}, clock)
    pace.begin("train", TRAIN)
    rounds(pace, clock, 20, 2.0, 1.0, 1.0)
    pace.end("train")
    pace.begin("recover", quick)
    rounds(pace, clock, 4, 0.1, 0.05, 0.05)
    assert pace.left().likely_s == pytest.approx(0.6)


def test_a_phase_like_one_that_is_over_takes_as_long():
    """Retraining for another request: 20 rounds of 3 s, as they were, within 15 %."""
    clock = Clock()
    first, second = (Load("unlearn", 20, plain=plain, matched=0.0, clients=9) for plain in (1000.0, 1100.0))
    pace = Pace({1: first, 2: second}, clock)
    pace.begin(1, first)
    rounds(pace, clock, 20, 3.0, 1.0, 1.0)
    pace.end(1)
    left = pace.left()
    assert left.likely_s == pytest.approx(60.0)
    assert left.high_s / left.low_s == pytest.approx(1.15**2)


def test_after_a_resume_only_the_rounds_of_this_attempt_tell_of_the_speed():
    """15 of 20 rounds were done before, one takes 2 s now: 8 s are left; the share counts what was done."""
    clock = Clock()
    pace = Pace({"train": TRAIN}, clock)
    pace.begin("train", TRAIN, rounds_done=15)
    assert pace.share_done == pytest.approx(0.75)
    rounds(pace, clock, 1, 2.0, 1.0, 1.0)
    assert pace.left().likely_s == pytest.approx(8.0)


def test_the_first_round_is_told_by_its_clients():
    """Half of the clients have finished after 5 s: the one round of the only phase takes 10."""
    clock = Clock()
    pace = Pace({"finetune": FINETUNE}, clock)
    pace.begin("finetune", FINETUNE)
    clock.now_s = 5.0
    assert pace.left() is None
    pace.clients(5, 10)
    assert pace.left().likely_s == pytest.approx(5.0)


def test_what_grows_with_the_clients_makes_the_range_wide():
    """1 s beside the steps of 10 clients; a phase of 1,000: between 1 s and 100 s beside its steps."""
    clock = Clock()
    many = Load("recover", 1, plain=0.0, matched=0.0, clients=1000)
    pace = Pace({"train": TRAIN, "recover": many}, clock)
    pace.begin("train", TRAIN)
    rounds(pace, clock, 20, 1.0, 0.0, 0.0)
    pace.end("train")
    left = pace.left()
    assert (left.low_s, left.high_s) == pytest.approx((1.0, 100.0))


def test_a_phase_that_a_rule_may_end_can_be_over_after_its_next_round():
    """Ten of twenty rounds of 2 s: 20 s, or 2 s."""
    clock = Clock()
    load = Load("train", 20, plain=1.0, matched=0.0, clients=1, may_end=True)
    pace = Pace({"train": load}, clock)
    pace.begin("train", load)
    rounds(pace, clock, 10, 2.0, 1.0, 1.0)
    assert pace.left().likely_s == pytest.approx(20.0)
    assert pace.left().low_s == pytest.approx(2.0 / 1.15)


def by_hand(pace, known, now):
    """Sum up, phase by phase, what those to come take: as the last one that was like it, else by prices."""
    total = [0.0, 0.0, 0.0]
    for key, load in pace._ahead.items():
        if key == now:
            continue
        alike = [seconds for other, seconds in known if other.is_like(load)]
        span = (alike[-1] / 1.15, alike[-1], alike[-1] * 1.15) if alike else pace._prices.round_s(load)
        after = pace._prices.plain_s * load.after
        ends = [load.rounds * end + after for end in span]
        ends[0] /= load.rounds if load.may_end else 1
        total = [a + b for a, b in zip(total, ends, strict=True)]
    return total


def test_what_is_kept_between_events_is_what_a_sum_over_all_phases_gives():
    """40 phases of nine sizes, some alike within 25 %, run one after the other, half of the second ten skipped.

    After every round, and at a client's event between two, the time left is that of the running phase, by its mean
    round, and of each phase to come, looked at one by one.
    """
    clock = Clock()
    sizes = [(kind, 1000.0 * plain) for kind in ("train", "unlearn", "recover") for plain in (1.0, 1.2, 4.0)]
    loads = {n: Load(*_load(sizes[n * 7 % 9], n)) for n in range(40)}
    pace, known = Pace(loads, clock), []
    for n, load in loads.items():
        if 10 <= n < 20 and n % 2:
            pace.end(n)
            continue
        pace.begin(n, load)
        took = []
        for number in range(load.rounds):
            took.append(1.0 + n / 10 + number / 7)
            rounds(pace, clock, 1, took[-1], 0.5, 0.8, 0.2)
            mean = sum(took) / len(took)
            now_s = mean * (load.rounds - number - 1)
            for event in (lambda: None, lambda: pace.clients(1, 10)):
                event()
                low, likely, high = by_hand(pace, known, n)
                found = pace.left()
                assert (found.likely_s, found.high_s) == pytest.approx((likely + now_s, high + 1.15 * now_s))
                if not load.may_end:
                    assert found.low_s == pytest.approx(low + now_s / 1.15)
        pace.end(n)
        known.append((load, sum(took) / len(took)))
    assert pace.share_done == 1.0


def _load(size, n):
    kind, plain = size
    return kind, 1 + n % 4, plain, plain / 2, 10, 500.0 * (n % 2), False, n % 3 == 0


def test_the_worst_estimate_is_found():
    """15 rounds of 10 s: after the tenth 50 s are left, as told, after the eleventh 40 s, and 20 s are told.

    The rest is right. What the first nine rounds tell does not count, nor what is told at the end; a later round that
    tells nothing is off by any factor.
    """
    likely = [None] * 8 + [1.0, 50.0, 20.0, 30.0, 20.0, 10.0, 9.0]
    told = [Told(10.0 * n, "", None if s is None else Left(s, s, s)) for n, s in enumerate(likely, 1)]
    assert worst(told, 150.0) == pytest.approx(2.0)
    told[12] = Told(130.0, "", None)
    assert worst(told, 150.0) == float("inf")
