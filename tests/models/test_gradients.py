"""Autograd's gradients of any network are those written out for the ConvNet, and those of finite differences."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from qdsim.algorithms import quickdrop
from qdsim.algorithms.distillation import initial_set, towards
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
from qdsim.models.compute import Compute
from qdsim.models.gradients import Autograd
from qdsim.models.module import ModuleModel
from tests.algorithms import settings
from tests.algorithms.federations import CLASS_2, CLIENT_1, COMPUTE, clients, largest_difference, run, start
from tests.algorithms.reference import class_gradients, distance, pixel_gradients
from tests.models.test_derivatives import SHAPES, network

CPU = torch.device("cpu")
BY_AUTOGRAD = replace(COMPUTE, model=replace(COMPUTE.model, autograd=True))
SETTINGS = {"sga": settings.SGA, "federaser": settings.FEDERASER, "fump": settings.FUMP, "s2u": settings.S2U}


@pytest.mark.parametrize("micro_batch", [2, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_autograd_and_the_written_out_give_the_same(shape, micro_batch):
    """Loss, gradient, gradients by class and the pixels' gradient, float64; a micro-batch of 2 cuts classes in two."""
    written, params, images, labels = network(shape, micro_batch)
    auto = replace(written, model=replace(written.model, autograd=True))
    assert isinstance(auto.gradients, Autograd)
    assert not isinstance(written.gradients, Autograd)
    counts = {0: 1, 1: 5, 3: 2, 4: 3}
    one = class_gradients(written, params, images, labels, list(counts.values()))
    other = class_gradients(auto, params, images, labels, list(counts.values()))
    torch.testing.assert_close(other[0], one[0])
    for left, right in zip(one[1:], other[1:], strict=True):
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            torch.testing.assert_close(right[name], tensor, rtol=1e-8, atol=1e-11)
    real = {name: stack.roll(1, 0) for name, stack in one[2].items()}
    found = [pixel_gradients(c, params, images, counts, real) for c in (written, auto)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(auto.gradients.logits(params, images), written.gradients.logits(params, images))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_the_same_way_by_autograd(method):
    """Training that distils, then each of the method's phases, three rounds each, float64: equal to 1e-9."""
    request = CLIENT_1 if "class" in METHODS[method].reasons else CLASS_2
    reached = []
    for compute in (COMPUTE, BY_AUTOGRAD):
        owned = clients()
        for i, client in owned.items():
            pick = torch.Generator().manual_seed(i)
            owned[i] = replace(client, synthetic=initial_set(client, settings.PLAIN, pick, torch.float64))
        history = History()
        (training,) = quickdrop.training(settings.HYPER)
        params = run(training, start(), history=history, compute=compute, owned=owned)
        found = [params, {str(i): c.synthetic.images for i, c in owned.items()}]
        for phase in METHODS[method].load().phases(settings.HYPER, SETTINGS.get(method), request, history):
            begin = start() if phase.start != "current" else params
            params = run(phase, begin, request, compute=compute, owned=owned)
            found.append(params)
        reached.append(found)
    for one, other in zip(*reached, strict=True):
        assert largest_difference(one, other) < 1e-9
    assert largest_difference(reached[0][0], reached[0][2]) > 1e-3


@pytest.mark.parametrize("kind", ["resnet", "lenet"])
def test_the_pixels_gradient_against_finite_differences(kind):
    """d moved by ±h in four pixels of an image, h = 1e-6, float64: the derivative agrees to 1e-5 of the largest."""
    options = {"resnet": '{"width": 4}', "lenet": '{"width": 3}'}[kind]
    model = ModuleModel(kind, 1, 12, 3, options)
    draws = torch.Generator().manual_seed(1)
    params = model.init(draws, torch.float64)
    images = torch.randn(5, 1, 12, 12, generator=draws, dtype=torch.float64)
    compute = Compute(model, CPU, 2)
    _, _, real = class_gradients(compute, params, images[3:], torch.tensor([1, 1]), [2])

    def value(pixels):
        _, _, own = class_gradients(compute, params, pixels, torch.full((3,), 1), [3])
        return distance([stack[0] / 3 for stack in own.values()], [stack[0] for stack in real.values()])

    gradient = compute.gradients.of_pixels(params)(images[:3], torch.full((3,), 1), [3], partial(towards, real=real))
    for row, y, x in [(0, 0, 0), (1, 5, 6), (2, 11, 11), (2, 3, 8)]:
        ends = []
        for h in (1e-6, -1e-6):
            moved = images[:3].clone()
            moved[row, 0, y, x] += h
            ends.append(float(value(moved)))
        slope = (ends[0] - ends[1]) / 2e-6
        assert slope == pytest.approx(float(gradient[row, 0, y, x]), abs=1e-5 * float(gradient.abs().max()))


def test_convolutions_in_bfloat16_point_the_same_way():
    """Autocast of a ResNet: the gradient stays within a few degrees of float32's, and is not the same."""
    model = ModuleModel("resnet", 1, 12, 3, '{"width": 8}')
    params = model.init(torch.Generator().manual_seed(0))
    images = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    exact, short = Compute(model, CPU, 32), Compute(model, CPU, 32, torch.bfloat16)
    _, one, _ = class_gradients(exact, params, images, labels, [2, 2, 2])
    _, other, _ = class_gradients(short, params, images, labels, [2, 2, 2])
    flat = [torch.cat([tensor.flatten() for tensor in found.values()]) for found in (one, other)]
    assert flat[1].dtype == torch.float32
    assert not torch.equal(*flat)
    assert torch.cosine_similarity(*flat, dim=0) > 0.97
