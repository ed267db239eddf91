"""S2U: the scaled mean by hand, and FedAvg as its special case."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qdsim.algorithms import fedavg, s2u
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
from qdsim.algorithms.phase import ClientUpdate
from qdsim.data.forgetting import View
from tests.algorithms.federations import CLIENT_1, counts, largest_difference, run, start
from tests.algorithms.settings import HYPER, S2U
from tests.conftest import CTX

LEAVER = frozenset([1])


def update(client_id, num_samples, delta):
    value = {"w": torch.tensor([delta], dtype=torch.float64)}
    return ClientUpdate(client_id, num_samples, value, loss=0.0, gradients=1, samples=1)


UPDATES = [update(0, 30, 1.0), update(1, 10, 8.0), update(2, 60, -1.0)]
ZERO = {"w": torch.zeros(1, dtype=torch.float64)}


def test_the_scaled_mean_by_hand():
    """p = 0.3, 0.1, 0.6; β = 0.5, γ = 2: 0.5·0.1·8 + 2·(0.3·1 - 0.6·1) = 0.4 - 0.6 = -0.2."""
    found = s2u.server_step(ZERO, UPDATES, CTX, leavers=LEAVER, leaver_factor=0.5, others_factor=2.0)
    assert found["w"].item() == pytest.approx(-0.2)


def test_by_default_the_weights_still_add_up_to_one():
    """β = 0.1, p_u = 0.1: γ = (1 - 0.01) / 0.9 = 1.1; equal updates of 1 move θ by exactly 1."""
    ones = [update(i, n, 1.0) for i, n in ((0, 30), (1, 10), (2, 60))]
    found = s2u.server_step(ZERO, ones, CTX, leavers=LEAVER, leaver_factor=0.1, others_factor="auto")
    assert found["w"].item() == pytest.approx(1.0)
    mixed = s2u.server_step(ZERO, UPDATES, CTX, leavers=LEAVER, leaver_factor=0.1, others_factor="auto")
    assert mixed["w"].item() == pytest.approx(0.1 * 0.1 * 8 + 1.1 * (0.3 - 0.6))


def test_both_factors_one_is_fedavg():
    """Three rounds on three clients: the same model to 1e-12."""
    settings = replace(S2U, rounds=3, leaver=1.0, others=1.0)
    scaled = s2u.phases(HYPER, settings, CLIENT_1, History())[0]
    plain = fedavg.phase("unlearn", scaled.stage, View("real"))
    assert largest_difference(run(scaled, start(), CLIENT_1), run(plain, start(), CLIENT_1)) < 1e-12


def test_a_leaver_that_counts_nothing_is_training_without_it():
    """β = 0 keeps the weight at 1, so two rounds equal FedAvg of the others."""
    scaled = s2u.phases(HYPER, replace(S2U, rounds=2, leaver=0.0), CLIENT_1, History())[0]
    others = fedavg.phase("unlearn", scaled.stage, View("real", without=CLIENT_1.forget))
    assert largest_difference(run(scaled, start(), CLIENT_1), run(others, start(), CLIENT_1)) < 1e-12


def test_the_leaver_takes_part_in_every_round():
    """A tenth of 20 clients are two; client 1 is added where it was not drawn."""
    sizes = np.full(20, 5)
    for number in range(1, 6):
        ctx = replace(CTX, round_number=number)
        drawn = fedavg.select(sizes, ctx, participation=0.1)
        assert s2u.select(sizes, ctx, participation=0.1, leavers=LEAVER) == sorted({*drawn, 1})


def test_phases():
    """Everybody on their own real data; no recovery unless asked for; relearning possible, classes not."""
    scaled, recover, relearn = s2u.phases(HYPER, S2U, CLIENT_1, History())
    assert scaled.view.sizes(counts(), counts()).tolist() == [13, 11, 4]
    assert (scaled.name, scaled.stage.rounds, recover.stage.rounds, relearn.name) == ("unlearn", 5, 0, "relearn")
    assert set(METHODS["s2u"].reasons) == {"class"}
