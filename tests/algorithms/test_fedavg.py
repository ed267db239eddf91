"""The server: who takes part, and the mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qdsim.algorithms import fedavg
from qdsim.algorithms.phase import ClientUpdate
from tests.conftest import CTX


def update(client_id, num_samples, delta):
    return ClientUpdate(client_id, num_samples, {"w": torch.tensor([delta])}, loss=0.0, gradients=1, samples=1)


def test_the_mean_is_weighted_by_samples():
    """θ = 0, Δ = 1 with 30 samples and Δ = 5 with 10: (30 + 50) / 40 = 2."""
    params = {"w": torch.tensor([0.0])}
    assert fedavg.server_step(params, [update(0, 30, 1.0), update(1, 10, 5.0)], CTX)["w"].item() == pytest.approx(2.0)


def test_only_holders_are_selected():
    """Clients without samples are never drawn; full participation takes all others, in order."""
    assert fedavg.select(np.array([5, 0, 3, 0, 1]), CTX, participation=1.0) == [0, 2, 4]


@pytest.mark.parametrize(("participation", "expected"), [(0.1, 10), (0.001, 1), (0.25, 25)])
def test_participation_is_a_share_of_the_holders(participation, expected):
    """10 % of 100 are 10; never fewer than one; sorted, distinct, and another set in another round."""
    sizes = np.ones(100, dtype=int)
    drawn = fedavg.select(sizes, CTX, participation=participation)
    assert len(set(drawn)) == expected
    assert drawn == sorted(drawn)
    assert drawn != fedavg.select(sizes, replace(CTX, round_number=2), participation=participation)
