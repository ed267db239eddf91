"""FedEraser: with nobody removed it repeats training; what is stored, and what is skipped."""

from dataclasses import replace

import pytest
import torch

from qdsim.algorithms import fedavg, federaser
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import RoundContext
from qdsim.data.forgetting import ForgetSet, UnlearningRequest, View
from qdsim.models import params as P
from tests.algorithms.federations import (
    CLASS_2,
    CLIENT_1,
    COMPUTE,
    NOBODY,
    clients,
    counts,
    largest_difference,
    run,
    start,
)
from tests.algorithms.settings import FEDERASER, HYPER

EVERY_ROUND = replace(FEDERASER, interval=1, calibration=1.0, first_round="calibrated")


def trained(hyper=HYPER, rounds=3):
    """Train by plain FedAvg; return θ, the history and every full update."""
    history, seen = History(), []
    stage = replace(hyper.train, rounds=rounds)
    params = run(fedavg.phase("train", stage, View("real")), start(), history=history, seen=seen)
    return params, history, seen


def test_with_nobody_removed_every_round_retained_and_r_1_it_repeats_training():
    """||U|| Û / ||Û|| = U when Û = U, up to the ε of 1e-12 in it; the same with the first round stored."""
    params, history, _ = trained()
    for first_round in ("calibrated", "stored"):
        replay = federaser.phases(HYPER, replace(EVERY_ROUND, first_round=first_round), NOBODY, history)[0]
        assert (replay.start, replay.stage.rounds, replay.stage.steps) == ("initial", 3, 4)
        assert largest_difference(run(replay, start(), NOBODY), params) < 1e-10


@pytest.mark.parametrize("norm", ["tensor", "model"])
def test_lengths_alone_give_the_result_of_full_storage(norm):
    """Replay without client 1, with Ũ formed from the stored updates themselves: equal to 1e-12."""
    _, history, seen = trained()
    stored = {(1 + n // 3, u.client_id): u.delta for n, u in enumerate(seen)}
    replay = federaser.phases(HYPER, replace(EVERY_ROUND, norm=norm), CLIENT_1, history)[0]
    found = run(replay, start(), CLIENT_1)
    expected = start()
    for t in (1, 2, 3):
        deltas = []
        for i in (0, 2):
            ctx = RoundContext(0, "client:1", "unlearn", t)
            fresh = replay.client_step(clients()[i], expected, ctx=ctx, compute=COMPUTE)[1].delta
            if norm == "tensor":
                scaled = {n: fresh[n] * (length(stored[t, i][n]) / (length(fresh[n]) + 1e-12)) for n in fresh}
            else:
                whole = [torch.cat([d[n].flatten() for n in d]) for d in (stored[t, i], fresh)]
                scaled = {n: fresh[n] * length(whole[0]) / length(whole[1]) for n in fresh}
            deltas.append((len(clients()[i].labels), scaled))
        expected = P.add_weighted_mean(expected, deltas)
    assert largest_difference(found, expected) < 1e-12


def length(tensor):
    return torch.linalg.vector_norm(tensor)


def test_the_first_round_without_the_client_is_the_mean_of_the_others_stored_updates():
    """θ_0 + (13 U_0 + 4 U_2) / 17, and nobody computes anything."""
    _, history, seen = trained()
    replay = federaser.phases(HYPER, FEDERASER, CLIENT_1, history)[0]
    ctx = RoundContext(0, "client:1", "unlearn", 1)
    assert replay.select(counts().sum(1), ctx) == []
    found = replay.server_step(start(), [], ctx)
    by_hand = {n: t + (13 * seen[0].delta[n] + 4 * seen[2].delta[n]) / 17 for n, t in start().items()}
    assert largest_difference(found, by_hand) < 1e-12


def test_class_level_calibrates_the_first_round_too():
    """Every stored update of round 1 has seen the class: all with anything left calibrate on what is left."""
    _, history, _ = trained()
    replay = federaser.phases(HYPER, FEDERASER, CLASS_2, history)[0]
    sizes = replay.view.sizes(counts(), counts())
    assert sizes.tolist() == [13, 3, 1]
    assert replay.select(sizes, RoundContext(0, "class:2", "unlearn", 1)) == [0, 1, 2]
    assert replay.stage.steps == 2  # r = 0.5 of T = 4


def test_retained_rounds():
    """K = 7, Δt = 2: 1, 3, 5; Δt = 1: all; K = 3, Δt = 5: the first at least."""
    assert federaser.retained_rounds(7, 2) == [1, 3, 5]
    assert federaser.retained_rounds(3, 1) == [1, 2, 3]
    assert federaser.retained_rounds(3, 5) == [1]


def test_round_j_replays_round_t_j_with_its_participants_and_its_draws():
    """Δt = 2: round 2 replays round 3, by those of its participants that are left."""
    history = History()
    for number, ids in {1: [0, 1], 2: [0], 3: [1, 2]}.items():
        for i in ids:
            history.record(number, i, 5, {"w": torch.ones(2)})
    chosen = federaser.select(counts().sum(1), RoundContext(7, "r", "unlearn", 2), history=history, interval=2,
                              stored_first=False)  # fmt: skip
    assert chosen == [1, 2]
    assert federaser._training_context(RoundContext(7, "r", "unlearn", 2), 2) == RoundContext(7, "", "train", 3)


def test_a_round_whose_participants_are_all_gone_changes_nothing():
    """Only client 1 took part in round 1, and client 1 is forgotten."""
    history = History()
    history.record(1, 1, 5, {name: torch.ones_like(tensor) for name, tensor in start().items()})
    replay = federaser.phases(HYPER, EVERY_ROUND, CLIENT_1, history)[0]
    ctx = RoundContext(0, "client:1", "unlearn", 1)
    assert replay.select(replay.view.sizes(counts(), counts()), ctx) == []
    assert largest_difference(replay.server_step(start(), [], ctx), start()) == 0


def test_a_stored_update_of_no_length_stays_without_effect():
    """A convolution's bias before normalisation: 1e-9 counts as zero, and 0 / 0 gives no NaN."""
    fresh = {"bias": torch.tensor([1e-9]), "dead": torch.zeros(2), "w": torch.tensor([3.0, 4.0])}
    found = federaser.calibrated_update(fresh, {"bias": 1e-9, "dead": 0.0, "w": 10.0}, "tensor")
    assert found["bias"].item() == 0
    assert found["dead"].tolist() == [0, 0]
    assert found["w"].tolist() == pytest.approx([6.0, 8.0])  # length 5 becomes 10


def test_storage_by_hand():
    """3 rounds of 3 clients, Δt = 2: round 1 alone is kept, 3 x 10 tensors x 8 bytes; nominally 3 whole updates."""
    _, history, _ = trained()
    model_bytes = P.size_bytes(start())
    assert federaser.storage_bytes(HYPER, FEDERASER, CLASS_2, history) == (3 * 10 * 8, 3 * model_bytes)
    # at client level the first round's updates are kept whole as well
    assert federaser.storage_bytes(HYPER, FEDERASER, CLIENT_1, history) == (
        3 * 10 * 8 + 3 * model_bytes,
        3 * model_bytes,
    )


def test_a_history_survives_being_stored():
    """Arrays and back: the same rounds, lengths and updates."""
    _, history, _ = trained()
    again = History.from_arrays(history.to_arrays())
    assert again.rounds == history.rounds
    assert all(largest_difference(again.first[i], history.first[i]) == 0 for i in range(3))


def test_after_a_class_was_forgotten_the_stored_round_is_not_used():
    """In a sequence class 2, then client 1: the stored updates hold class 2."""
    after = UnlearningRequest("2:client:1", CLIENT_1.forget, previously_forgotten=ForgetSet(classes=frozenset([2])))
    assert not federaser.uses_stored_first(FEDERASER, after)
    assert federaser.uses_stored_first(FEDERASER, CLIENT_1)
