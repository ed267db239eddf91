"""Gradient matching: the distance, the initial set, the pixels' gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qdsim.algorithms import distillation
from qdsim.algorithms.local_sgd import summed_gradient
from qdsim.models import params as P
from tests.algorithms.reference import distance, matched, pixel_gradients
from tests.algorithms.settings import PLAIN
from tests.conftest import CTX, make_client, make_compute


def stacked(gradient):
    """A class's gradient as a stack of one, of the tensors that matching looks at."""
    return {name: tensor[None] for name, tensor in gradient.items() if tensor.ndim >= 2}


def test_distance_by_hand():
    """Rows (3,4)·(4,3)/25 = 0.96 and (1,0)·(0,1) = 0: d = 0.04 + 1 = 1.04; a vector counts nothing."""
    a = [torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([1.0, 2.0])]
    b = [torch.tensor([[4.0, 3.0], [0.0, 1.0]]), torch.tensor([-9.0, 5.0])]
    assert distance(a, b).item() == pytest.approx(1.04, abs=1e-5)


def test_distance_of_equal_opposite_and_zero_gradients():
    """Equal: 0; opposite: 2 a row; a row of zeros: 1, with a finite derivative."""
    g = [torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))]
    assert distance(g, g).item() == pytest.approx(0, abs=1e-4)
    assert distance(g, [-g[0]]).item() == pytest.approx(10, abs=1e-4)
    zero = torch.zeros(5, 3, 2, 2, requires_grad=True)
    d = distance([zero], g)
    d.backward()
    assert d.item() == pytest.approx(5)
    assert torch.isfinite(zero.grad).all()


def test_lengths_do_not_matter():
    """Sums and means of gradients have the same distance, so nothing need be divided."""
    g = [torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
    h = [torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]
    far = distance(g, [1000 * h[0]])
    assert distance(g, h).item() == pytest.approx(far.item(), abs=1e-5)


def test_the_initial_set_has_a_third_of_each_class_rounded_up():
    """7, 3 and 1 samples at s = 3: 3, 1 and 1 images, equal to the real samples they began as."""
    client = make_client(0, [0] * 7 + [1] * 3 + [2])
    found = distillation.initial_set(client, PLAIN, torch.Generator().manual_seed(0))
    assert found.labels.tolist() == [0, 0, 0, 1, 2]
    assert (client.labels[found.origin] == found.labels).all()
    assert (client.labels[found.extra] == found.labels).all()
    expected = client.normalized(found.origin, torch.device("cpu"), torch.float32)
    assert torch.equal(found.images, expected)
    assert len(set(found.origin)) == 5
    # enough others in classes 0 and 1, so no sample stands beside itself; class 2 has only the one
    assert not set(found.origin[:4]) & set(found.extra[:4])
    assert found.extra[4] == found.origin[4]


def test_noise_has_the_same_labels_but_no_real_pixels():
    """init = noise keeps counts and labels."""
    client = make_client(0, [0] * 7 + [1] * 3)
    found = distillation.initial_set(client, replace(PLAIN, init="noise"), torch.Generator().manual_seed(0))
    real = client.normalized(found.origin, torch.device("cpu"), torch.float32)
    assert found.labels.tolist() == [0, 0, 0, 1]
    assert (found.images != real).all()


def test_pixel_gradient_against_finite_differences():
    """dd/dpixel by central differences in float64, at three pixels."""
    client = make_client(0, [0] * 6)
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0), torch.float64)
    images = client.normalized(np.arange(6), compute.device, torch.float64)
    labels = torch.zeros(4, dtype=torch.int64)
    _, real = summed_gradient(compute, params, images[2:], labels)
    matched = [n for n, p in params.items() if p.ndim >= 2]

    def d_of(pixels):
        _, g = summed_gradient(compute, params, pixels, labels[:2])
        return distance([g[n] for n in matched], [real[n] for n in matched]).item()

    gradient = pixel_gradients(compute, params, images[:2], {0: 2}, stacked(real))
    for at in ((0, 0, 3, 3), (1, 0, 0, 7), (1, 0, 5, 2)):
        up, down = images[:2].clone(), images[:2].clone()
        up[at] += 1e-5
        down[at] -= 1e-5
        assert gradient[at].item() == pytest.approx((d_of(up) - d_of(down)) / 2e-5, rel=1e-3, abs=1e-6)


def test_matching_steps_reduce_the_distance():
    """Two hundred pixel steps against fixed real gradients: the distance falls by a fifth at least."""
    client = make_client(0, [0] * 12)
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0))
    images = client.normalized(np.arange(12), compute.device, torch.float32)
    _, real = summed_gradient(compute, params, images[4:], torch.zeros(8, dtype=torch.int64))
    pixels, velocity = images[:4].clone(), torch.zeros_like(images[:4])
    looked_at = [n for n, p in params.items() if p.ndim >= 2]

    def d_now():
        _, g = summed_gradient(compute, params, pixels, torch.zeros(4, dtype=torch.int64))
        return distance([g[n] for n in looked_at], [real[n] for n in looked_at]).item()

    before = d_now()
    rows = matched({0: np.arange(4)})
    distillation.match(compute, params, pixels, velocity, rows, stacked(real), replace(PLAIN, steps=200))
    assert d_now() < 0.8 * before


def test_momentum_by_hand():
    """With m = 0.5 the second step moves by 0.5 v₁ + g₂; rows outside B^S do not move at all."""
    client = make_client(0, [0] * 6)
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0), torch.float64)
    images = client.normalized(np.arange(6), compute.device, torch.float64)
    _, real = summed_gradient(compute, params, images[3:], torch.zeros(3, dtype=torch.int64))
    pixels, velocity = images[:3].clone(), torch.zeros_like(images[:3])
    rows = np.array([0, 2])
    g1 = pixel_gradients(compute, params, pixels[rows], {0: 2}, stacked(real))
    x1 = pixels[rows] - 0.1 * g1
    g2 = pixel_gradients(compute, params, x1, {0: 2}, stacked(real))
    x2 = x1 - 0.1 * (0.5 * g1 + g2)
    distillation.match(compute, params, pixels, velocity, matched({0: rows}), stacked(real), replace(PLAIN, steps=2))
    torch.testing.assert_close(pixels[rows], x2)
    assert torch.equal(pixels[1], images[1])
    assert (velocity[1] == 0).all()


def test_finetuning_changes_the_set_and_not_the_model(monkeypatch):
    """Two inner steps stand for fifty: pixels move, the update carries no delta, origin and labels stay."""
    monkeypatch.setattr(distillation, "FINETUNE_STEPS", 2)
    client = make_client(0, [0] * 6 + [1] * 4)
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0))
    before = P.sha256(params)
    pick = torch.Generator().manual_seed(0)
    client = replace(client, synthetic=distillation.initial_set(client, PLAIN, pick))
    after, update = distillation.finetune(client, params, distillation=PLAIN, batch_size=4, ctx=CTX, compute=compute)
    assert P.sha256(params) == before
    assert update.delta == {}
    # two inner steps, each with 4 + 4 real samples of the two classes; one gradient counted a step
    assert (update.gradients, update.samples) == (2, 16)
    assert not torch.equal(after.synthetic.images, client.synthetic.images)
    assert (after.synthetic.origin == client.synthetic.origin).all()
