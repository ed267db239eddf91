"""Local SGD, descent and ascent, by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from qdsim.algorithms import local_sgd
from qdsim.algorithms.settings import Stage
from qdsim.data.forgetting import View
from qdsim.errors import Diverged
from qdsim.models import params as P
from qdsim.models.convnet import ConvNet
from tests.conftest import CTX, make_client, make_compute

REAL = View("real")


def hand_client(pixel_bytes, labels):
    """Images of one pixel; with mean 0 and deviation 1/255 a byte b becomes the number b."""
    from qdsim.data.clients import ClientState
    from qdsim.data.datasets import Normalization

    pool = np.array(pixel_bytes, dtype=np.uint8).reshape(-1, 1, 1, 1)
    return ClientState(0, pool, Normalization((0.0,), (1 / 255,)), np.arange(len(labels)), np.array(labels))


def hand_run(sign_ascend, steps=1, max_loss=math.inf, w=0.0):
    from qdsim.models.compute import Compute

    client = hand_client([2, 2], [1, 1])
    stage = Stage(rounds=1, steps=steps, batch_size=8, lr=0.5, participation=1.0)
    params = {
        "linear.weight": torch.tensor([[0.0], [w]], dtype=torch.float64),
        "linear.bias": torch.zeros(2, dtype=torch.float64),
    }
    # no block at all: two logits of a single pixel, the smallest network with a gradient one can do by hand
    compute = Compute(ConvNet(channels=1, size=1, num_classes=2, depth=0), torch.device("cpu"), 1)
    return local_sgd.run(
        client, params, stage=stage, view=REAL, ctx=CTX, compute=compute, ascend=sign_ascend, max_loss=max_loss
    )[1]


def test_one_step_by_hand():
    """Pixel 2, label 1, w = 0: p(1) = 1/2, loss ln 2; for the label's logit dL/dw = -(1 - p) x = -1 and dL/db = -1/2.

    For the other logit the opposite. With η = 0.5 descent moves w by 0.5 and b by 0.25, ascent the other way.
    """
    descent, ascent = hand_run(False), hand_run(True)
    assert descent.delta["linear.weight"].flatten().tolist() == pytest.approx([-0.5, 0.5])
    assert descent.delta["linear.bias"].tolist() == pytest.approx([-0.25, 0.25])
    assert ascent.delta["linear.weight"].flatten().tolist() == pytest.approx([0.5, -0.5])
    assert descent.loss == pytest.approx(math.log(2))
    assert (descent.num_samples, descent.samples, descent.gradients) == (2, 2, 1)


def test_ascent_stops_once_the_loss_has_passed_the_limit():
    """Losses by hand: ln 2 = 0.69, then the logits are 1.25 and -1.25: ln(1 + e^2.5) = 2.58 > 1. One step is taken.

    The second gradient was computed, so it counts; it is not applied.
    """
    stopped = hand_run(True, steps=10, max_loss=1.0)
    assert stopped.delta["linear.weight"][1].item() == pytest.approx(-0.5)
    assert (stopped.gradients, stopped.samples) == (2, 4)
    assert hand_run(True, steps=10).gradients == 10


def test_descent_never_stops_at_the_limit():
    """The limit is for ascent alone."""
    assert hand_run(False, steps=10, max_loss=0.01).gradients == 10


def test_a_loss_that_is_no_number_is_refused():
    """w = NaN gives a NaN loss: the client refuses to send it."""
    with pytest.raises(Diverged, match="no longer finite"):
        hand_run(False, w=math.nan)


def test_micro_batches_add_up_to_the_batch_gradient():
    """Pieces of 1, 3 and 7 of 10 samples: the same gradient to 1e-12 in float64."""
    client = make_client(0, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
    whole = None
    for micro_batch in (100, 1, 3, 7):
        compute = make_compute(micro_batch=micro_batch)
        params = compute.model.init(torch.Generator().manual_seed(0), torch.float64)
        images, labels = client.samples(REAL).batch(np.arange(10), compute.device, torch.float64)
        _, gradient = local_sgd.summed_gradient(compute, params, images, labels)
        if whole is None:
            leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
            loss = F.cross_entropy(compute.model.forward(leaves, images), labels, reduction="sum")
            whole = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for name in whole:
            torch.testing.assert_close(gradient[name], whole[name], rtol=0, atol=1e-12)


def test_ascent_undoes_descent_to_first_order():
    """θ - η∇L(θ) + η∇L(θ - η∇L(θ)) = θ + O(η²): halving η divides what is left by four."""
    client = make_client(0, [0, 1, 2] * 3)
    compute = make_compute()
    start = compute.model.init(torch.Generator().manual_seed(0), torch.float64)

    def left_over(lr):
        stage = Stage(1, 1, 100, lr, 1.0)
        arguments = {"stage": stage, "view": REAL, "ctx": CTX, "compute": compute}
        _, down = local_sgd.run(client, start, **arguments)
        lower = {n: start[n] + down.delta[n] for n in start}
        _, up = local_sgd.run(client, lower, **arguments, ascend=True)
        return sum(float((down.delta[n] + up.delta[n]).square().sum()) for n in start) ** 0.5

    assert left_over(1e-3) / left_over(5e-4) == pytest.approx(4, rel=0.05)


def test_batches_pass_over_everything_before_they_repeat():
    """10 samples in batches of 4: two a pass, the remainder of 2 is dropped; fewer than a batch: all of them."""
    drawn = list(local_sgd.batches(10, 4, 4, torch.Generator().manual_seed(0)))
    assert [len(b) for b in drawn] == [4, 4, 4, 4]
    assert len(set(np.concatenate(drawn[:2]))) == 8
    assert [sorted(b) for b in local_sgd.batches(3, 4, 2, torch.Generator())] == [[0, 1, 2], [0, 1, 2]]


def test_a_step_leaves_what_it_was_given_alone():
    """Neither the parameters nor the client change; the same step gives the same bits."""
    client = make_client(0, [0, 1, 2] * 3)
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0))
    before = P.sha256(params)
    arguments = {"stage": Stage(1, 3, 4, 0.1, 1.0), "view": REAL, "ctx": CTX, "compute": compute}
    after, first = local_sgd.run(client, params, **arguments)
    _, second = local_sgd.run(client, params, **arguments)
    assert after is client
    assert P.sha256(params) == before
    assert P.sha256(first.delta) == P.sha256(second.delta)
