"""The server's rules by hand: two rounds on one number, and that FedAvg's own is the mean, bit for bit."""

from dataclasses import replace

import pytest
import torch

from qdsim.algorithms import fedavg, local_sgd, server
from qdsim.algorithms.server import Server
from qdsim.algorithms.stopping import TRAINED
from qdsim.data.forgetting import View
from qdsim.errors import BadInput
from tests.algorithms.federations import CLASS_2, clients, largest_difference, run, start
from tests.algorithms.settings import HYPER, STAGE
from tests.conftest import CTX, make_compute


def two_rounds(settings, deltas=(2.0, -1.0)):
    """θ after each of two rounds from 1, whose means lie so far from the round's model."""
    params, state, reached = {"x": torch.tensor([1.0], dtype=torch.float64)}, {}, []
    for delta in deltas:
        params, state = server.step(settings, params, {"x": params["x"] + delta}, state)
        reached.append(float(params["x"]))
    return reached


def test_the_mean_with_a_rate():
    """η = 0.5: 1 + 1 = 2, then 2 - 0.5 = 1.5."""
    assert two_rounds(Server("mean", lr=0.5)) == [2.0, 1.5]


def test_momentum_by_hand():
    """β = 0.5: m = 2, θ = 3; m = 0.5·2 - 1 = 0, θ = 3. With η = 0.1 the first step is 0.2."""
    assert two_rounds(Server("momentum", momentum=0.5)) == [3.0, 3.0]
    assert two_rounds(Server("momentum", momentum=0.5, lr=0.1)) == pytest.approx([1.2, 1.2])


def test_adam_by_hand():
    """β₁ = 0.5, β₂ = 0.75, τ = 0.5, η = 1, v₀ = 0.25.

    Round 1: m = 1, v = 0.75·0.25 + 0.25·4 = 1.1875. Round 2: m = 0.5·1 - 0.5 = 0, so θ stays.
    """
    expected = 1 + 1 / (1.1875**0.5 + 0.5)
    settings = Server("adam", lr=1.0, momentum=0.5, beta2=0.75, tau=0.5)
    assert two_rounds(settings) == pytest.approx([expected, expected])
    # a second step of 2: m = 0.5·1 + 1 = 1.5, v = 0.75·1.1875 + 1 = 1.890625
    assert two_rounds(settings, (2.0, 2.0))[1] == pytest.approx(expected + 1.5 / (1.890625**0.5 + 0.5))


def test_yogi_by_hand():
    """As above but for v: 0.25 - 0.25·4·sign(0.25 - 4) = 1.25; then 1.25 - 0.25·1·sign(1.25 - 1) = 1."""
    settings = Server("yogi", lr=1.0, momentum=0.5, beta2=0.75, tau=0.5)
    first = 1 + 1 / (1.25**0.5 + 0.5)
    assert two_rounds(settings) == pytest.approx([first, first])
    # a second step of -3 instead: m = 0.5 - 1.5 = -1, v = 1.25 - 0.25·9·sign(1.25 - 9) = 3.5
    assert two_rounds(settings, (2.0, -3.0))[1] == pytest.approx(first - 1 / (3.5**0.5 + 0.5))


def test_fedavg_is_the_mean_itself():
    """With the default settings the very tensors come back, and there is nothing to remember."""
    params, mean = start(torch.float32), start(torch.float32)
    found, state = server.step(Server(), params, mean, {})
    assert found is mean
    assert state == {}


def test_rates_that_are_left_to_the_rule():
    """1 for the mean and momentum, 0.01 for the adaptive ones."""
    assert [Server(kind).rate for kind in server.RULES] == [1.0, 1.0, 0.01, 0.01]


def test_a_rule_acts_where_clients_descend_and_nowhere_else():
    """QuickDrop ascends by the mean and recovers by the rule; retraining has the rule of training."""
    from qdsim.algorithms import federaser, fump, quickdrop, retrain
    from qdsim.algorithms.history import History
    from tests.algorithms.settings import FEDERASER, FUMP

    hyper = replace(HYPER, server=Server("adam"))
    kinds = {
        name: [phase.server.kind for phase in found]
        for name, found in {
            "training": quickdrop.training(hyper),
            "quickdrop": quickdrop.phases(hyper, None, CLASS_2, History()),
            "retrain": retrain.phases(hyper, None, CLASS_2, History()),
            "federaser": federaser.phases(hyper, FEDERASER, CLASS_2, History()),
            "fump": fump.phases(hyper, FUMP, CLASS_2, History()),
        }.items()
    }
    assert kinds == {
        "training": ["adam"],
        "quickdrop": ["mean", "adam", "adam"],
        "retrain": ["adam", "adam"],
        "federaser": ["mean", "adam", "adam"],
        "fump": ["mean", "adam"],
    }


def test_unknown_rules_are_refused():
    """With those that there are."""
    with pytest.raises(BadInput, match=r"server.kind = 'adamw': no such server rule; allowed: mean, "):
        server.rule_of("adamw")


def prox(mu, steps=2):
    """A client's update after so many steps of its first phase of training."""
    stage = replace(STAGE, steps=steps, proximal=mu)
    return local_sgd.run(clients()[0], start(), stage=stage, view=View("real"), ctx=CTX, compute=make_compute())[1]


def test_fedprox_by_hand():
    """μ pulls the second step back by η μ (θ_1 - θ_0); the first begins at θ_0 and is FedAvg's.

    So the updates after two steps, U with μ and V without, have U = V - η μ Δ_1 with Δ_1 the first step's, since the
    second gradient is taken at the same θ_1.
    """
    first, plain, pulled = prox(0.0, 1).delta, prox(0.0).delta, prox(0.5).delta
    expected = {name: plain[name] - STAGE.lr * 0.5 * first[name] for name in plain}
    assert largest_difference(pulled, expected) < 1e-12
    assert largest_difference(prox(0.5, 1).delta, first) == 0


def test_fedprox_without_its_term_is_fedavg_bit_for_bit():
    """μ = 0, float32, three rounds."""
    phases = [fedavg.phase("train", replace(STAGE, proximal=mu), View("real"), TRAINED) for mu in (0.0, 0.0)]
    one, other = (run(phase, start(torch.float32)) for phase in (phases[0], replace(phases[1], stage=STAGE)))
    assert all(torch.equal(one[name], other[name]) for name in one)
