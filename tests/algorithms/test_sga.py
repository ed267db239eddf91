"""SGA-Or: who ascends on what, and the two other objectives."""

import math
from dataclasses import replace

import pytest
import torch

from qdsim.algorithms import local_sgd, sga
from qdsim.algorithms.history import History
from qdsim.data.forgetting import View
from tests.algorithms.federations import CLASS_2, CLIENT_1, COMPUTE, clients, counts, largest_difference, start
from tests.algorithms.settings import HYPER, SGA, STAGE
from tests.conftest import CTX

ONE_STEP = replace(STAGE, steps=1, rounds=1)


def test_rounds_and_participants():
    """2 + 2 rounds; holders of class 2 (clients 1 and 2) ascend; at client level client 1 alone."""
    unlearn, recover, relearn = sga.phases(HYPER, SGA, CLASS_2, History())
    assert [(p.name, p.stage.rounds) for p in (unlearn, recover, relearn)] == [
        ("unlearn", 2),
        ("recover", 2),
        ("relearn", 3),
    ]
    assert unlearn.view.sizes(counts(), counts()).tolist() == [0, 8, 3]
    assert recover.view.sizes(counts(), counts()).tolist() == [13, 3, 1]
    assert recover.view.source == "real"
    assert sga.phases(HYPER, SGA, CLIENT_1, History())[0].view.sizes(counts(), counts()).tolist() == [0, 11, 0]


def test_bounded_loss_by_hand():
    """p_y = 1/2 on both of two samples: -2 log(3/4); p_y = 1: log 2; p_y → 0: 0."""
    even = torch.zeros(2, 2, dtype=torch.float64)
    labels = torch.tensor([0, 1])
    assert sga.bounded_loss(even, labels).item() == pytest.approx(-2 * math.log(0.75))
    sure = torch.tensor([[800.0, 0.0]], dtype=torch.float64)
    assert sga.bounded_loss(sure, torch.tensor([0])).item() == pytest.approx(math.log(2))
    assert sga.bounded_loss(sure, torch.tensor([1])).item() == 0


def test_reflection_is_ascent_for_one_step():
    """θ + (θ - (θ - η g)) = θ + η g; for more steps the two part."""
    client, params, view = clients()[1], start(), View("real")
    for stage, equal in ((ONE_STEP, True), (replace(STAGE, steps=3), False)):
        settings = {"stage": stage, "view": view, "ctx": CTX, "compute": COMPUTE}
        up = local_sgd.run(client, params, ascend=True, **settings)[1].delta
        mirrored = sga.reflect(client, params, **settings)[1].delta
        assert (largest_difference(up, mirrored) < 1e-12) is equal


@pytest.mark.parametrize("mode", ["ascent", "reflect", "bounded"])
def test_every_mode_raises_the_loss_on_the_forget_set(mode):
    """20 steps on client 1's class 2: cross-entropy there is higher than before."""
    hyper = replace(HYPER, unlearn=replace(HYPER.unlearn, steps=20), max_loss=3.0)
    unlearn = sga.phases(hyper, replace(SGA, mode=mode), CLASS_2, History())[0]
    client, params = clients()[1], start()
    delta = unlearn.client_step(client, params, ctx=CTX, compute=COMPUTE)[1].delta
    after = {name: params[name] + delta[name] for name in params}

    def loss(theta):
        samples = client.samples(unlearn.view)
        images, labels = samples.batch(torch.arange(len(samples)).numpy(), COMPUTE.device, torch.float64)
        return local_sgd.summed_gradient(COMPUTE, theta, images, labels)[0].item() / len(labels)

    assert loss(after) > loss(params) + 0.1
