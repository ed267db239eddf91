"""The server's rules by hand: two rounds on one number, and that FedAvg's own is the mean, bit for bit."""

import sys
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch

from qdsim.algorithms import distillation, fedavg, local_sgd, quickdrop, server
from qdsim.algorithms.server import Server
from qdsim.algorithms.stopping import TRAINED
from qdsim.data.forgetting import View
from qdsim.errors import BadInput
from tests.algorithms.federations import CLASS_2, clients, largest_difference, run, start
from tests.algorithms.settings import HYPER, PLAIN, STAGE
from tests.conftest import CTX, make_compute
from tests.runs import run as run_tiny


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
    from qdsim.algorithms import federaser, fump, retrain
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


RULE = """
    def rule(params, delta, state, settings):
        {body}

    def narrow(params, delta):
        return delta, {{}}

    number = 3
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Write a rule into the folder where the command runs; return its name in a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    server.rule_of.cache_clear()

    def write(body, name="rule"):
        (tmp_path / "their_rules.py").write_text(textwrap.dedent(RULE.format(body=body)), encoding="utf-8")
        return f"their_rules:{name}"

    yield write
    sys.modules.pop("their_rules", None)
    server.rule_of.cache_clear()


@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("number", "pass", "is no function but a int"),
        ("narrow", "pass", r"too many positional arguments; wanted is rule\(params, delta, state, settings\)"),
        ("rule", "return None", "its rule returned NoneType; wanted are the step and the state, two dicts of tensors"),
        ("rule", "return delta", "its rule returned dict; wanted"),
        ("rule", "return delta, None", "its state is a NoneType"),
        ("rule", "return delta, {'rounds': 3}", "its state holds a int under 'rounds'"),
        ("rule", "return {'x': 1.0}, {}", "its step holds a float under 'x'"),
        ("rule", "return {}, {}", r"its step of \S+ is not there, in the model \("),
        ("rule", "return {n: t.sum() for n, t in delta.items()}, {}", r"its step of \S+ is \(\), in the model \("),
        ("rule", "return delta | {'more': delta[min(delta)]}, {}", r"its step of more is \(.*, in the model unknown"),
        ("rule", "return {n: t / 0 for n, t in delta.items()}, {}", "for updates of 0.01 its step of .* is not finite"),
        ("rule", "return delta, {'m': state['m']}", r"its rule fails: KeyError: 'm' \(their_rules.py, line 3\)"),
        ("rule", "exit(3)", "its rule fails: SystemExit: 3"),
        # the second round is tried as well
        ("rule", "return (delta if not state else None), {'m': delta[min(delta)]}", "its step is a NoneType"),
    ],
)
def test_a_bad_rule_is_refused_before_anything_runs(theirs, tmp_path, name, body, why):
    """One line under the job's key, and no run directory."""
    with pytest.raises(BadInput, match=why) as refused:
        run_tiny(tmp_path / "out", server={"kind": theirs(body, name)})
    assert str(refused.value).startswith("server.kind = 'their_rules:")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_rule_of_ones_own_may_remember(theirs):
    """m ← m + Δ from nothing: after Δ = 2 and -1 the steps are 2 and 1, so θ is 3 and 4 from 1; it is looked up once.

    The two calls before anything runs leave no trace: nothing of their state is kept.
    """
    name = theirs("m = delta['x'] + (state['m'] if state else 0); return {'x': m}, {'m': m}")
    settings = Server(name)
    server.check_rule(settings, {"x": torch.ones(1)})
    assert two_rounds(settings) == [3.0, 4.0]
    assert server.rule_of(name) is server.rule_of(name)
    assert server.rule_of.cache_info().misses == 1


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


def descent(client, params, *, ctx, compute, mu=None):
    """A client's steps written out: θ ← θ - η ∇L, and with μ first θ ← θ - η μ (θ - θ_0)."""
    samples = client.samples(View("real"))
    theta = {name: tensor.clone() for name, tensor in params.items()}
    drawn = local_sgd.batches(len(samples), STAGE.batch_size, STAGE.steps, ctx.generator("batches", client.client_id))
    losses = []
    for images, labels in samples.batches(drawn, compute.device, params[min(params)].dtype):
        loss, gradient = local_sgd.summed_gradient(compute, theta, images, labels)
        for name, tensor in theta.items():
            if mu is not None:
                tensor -= STAGE.lr * mu * (tensor - params[name])
            tensor.add_(gradient[name], alpha=-STAGE.lr / len(labels))
        losses.append(loss / len(labels))
    return client, local_sgd.make_update(client.client_id, len(samples), params, theta, losses, len(samples))


def test_fedprox_without_its_term_is_fedavg_bit_for_bit():
    """float32, three rounds: with μ = 0 the very bits of plain steps, with μ = 0.001 others.

    So are those of a term that is computed with μ = 0, since θ - 0·(θ - θ_0) is θ.
    """

    def trained(mu, step=None):
        phase = fedavg.phase("train", replace(STAGE, proximal=mu), View("real"), TRAINED)
        return run(replace(phase, client_step=step) if step else phase, start(torch.float32))

    found = trained(0.0)
    for plain in (trained(0.0, descent), trained(0.0, partial(descent, mu=0.0))):
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert largest_difference(found, trained(1e-3)) > 0
    assert largest_difference(trained(1e-3), trained(1e-3, partial(descent, mu=1e-3))) < 1e-6


def test_quickdrops_own_steps_have_the_proximal_term():
    """As above, by its own loop: U = V - η μ Δ_1 after two steps, and so nearly what local SGD with the term gives."""

    def drop(mu, steps):
        client = clients()[0]
        drawn = distillation.initial_set(client, PLAIN, torch.Generator().manual_seed(0), torch.float64)
        stage = replace(STAGE, steps=steps, proximal=mu)
        learn = partial(quickdrop.train, stage=stage, distillation=PLAIN, ctx=CTX, compute=make_compute())
        return learn(replace(client, synthetic=drawn), start())[1].delta

    first, plain, pulled = drop(0.0, 1), drop(0.0, 2), drop(0.5, 2)
    assert largest_difference(pulled, {n: plain[n] - STAGE.lr * 0.5 * first[n] for n in plain}) < 1e-12
    assert largest_difference(drop(0.5, 1), first) == 0
    assert largest_difference(pulled, plain) > 1e-6
    assert largest_difference(pulled, prox(0.5).delta) < 1e-10
