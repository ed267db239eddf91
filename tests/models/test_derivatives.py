"""The derivatives written out are those of autograd, to rounding in float64."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from qdsim.algorithms.distillation import group_by_size, match, towards
from qdsim.algorithms.local_sgd import cross_entropy
from qdsim.models.compute import Compute
from qdsim.models.convnet import ConvNet
from qdsim.models.fast import derivatives, winograd
from qdsim.models.fast.cuda import Fused
from qdsim.models.gradients import micro_batches
from tests.algorithms import reference
from tests.algorithms.reference import class_gradients, matched, pixel_gradients
from tests.algorithms.settings import PLAIN

SHAPES = [(3, 32, 3), (1, 28, 3), (1, 8, 3), (2, 9, 2), (1, 6, 1)]
"""Channels, size and depth: the paper's two, the digits, an odd size, a single block."""


def network(shape, micro_batch=4, width=3):
    """A network whose γ and β are not those of the beginning, and images of four classes, sorted: 1, 5, 2, 3."""
    channels, size, depth = shape
    draws = torch.Generator().manual_seed(size)
    model = ConvNet(channels, size, num_classes=5, width=width, depth=depth)
    params = model.init(draws, torch.float64)
    for name, tensor in params.items():
        if name.startswith("norm"):
            tensor += 0.3 * torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
    labels = torch.tensor([0] + [1] * 5 + [3] * 2 + [4] * 3)
    images = torch.randn(11, channels, size, size, generator=draws, dtype=torch.float64)
    return Compute(model, torch.device("cpu"), micro_batch), params, images, labels


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_networks(shape):
    """With the way back and without it."""
    compute, params, images, _ = network(shape)
    expected = compute.model.forward(params, images)
    for keep in (True, False):
        done = derivatives.forward(compute.model, params, images, keep)
        torch.testing.assert_close(done.logits, expected, rtol=1e-10, atol=1e-12)
        assert len(done.blocks) == (shape[2] if keep else 0)


@pytest.mark.parametrize("micro_batch", [1, 4, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_by_class_and_in_all(shape, micro_batch):
    """Micro-batches of 4 cut classes in two; the sum over classes is the gradient of the batch."""
    compute, params, images, labels = network(shape, micro_batch)
    loss, total, by_class = class_gradients(compute, params, images, labels, [1, 5, 2, 3])
    expected_loss, expected = reference.gradient(compute.model, params, images, labels)
    torch.testing.assert_close(loss, expected_loss)
    for name in params:
        torch.testing.assert_close(total[name], expected[name], rtol=1e-8, atol=1e-11)
    for place, c in enumerate((0, 1, 3, 4)):
        _, own = reference.gradient(compute.model, params, images[labels == c], labels[labels == c])
        for name, stack in by_class.items():
            torch.testing.assert_close(stack[place], own[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("micro_batch", [2, 4, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pixels_gradient(shape, micro_batch):
    """All classes in one pass, against a double backward for each class alone."""
    compute, params, images, labels = network(shape, micro_batch)
    real = {
        c: reference.gradient(compute.model, params, images.flip(0)[:4], torch.full((4,), c))[1] for c in (0, 1, 3, 4)
    }
    stacked = {n: torch.stack([own[n] for own in real.values()]) for n, t in params.items() if t.ndim >= 2}
    found = pixel_gradients(compute, params, images, {0: 1, 1: 5, 3: 2, 4: 3}, stacked)
    for c, own in real.items():
        expected = reference.pixel_gradient(compute.model, params, images[labels == c], c, own)
        torch.testing.assert_close(found[labels == c], expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("micro_batch", [2, 4, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradients_for_gpus_are_the_same(shape, micro_batch):
    """One product for all classes, and one operation between convolutions, in plain torch here: 1e-8 in float64.

    All classes of the network have a place, those without samples among them. A batch as a whole goes another way;
    logits have no way back.
    """
    compute, params, images, labels = network(shape)
    other = Fused(compute.model, micro_batch)
    counts = {0: 1, 1: 5, 3: 2, 4: 3}
    sizes = list(counts.values())
    whole = images[1:6].flip(3), labels[1:6], [5], cross_entropy
    torch.testing.assert_close(
        other.of_classes(params, *whole), compute.gradients.of_classes(params, *whole), rtol=1e-8, atol=1e-11
    )
    loss, gradient, real = class_gradients(compute, params, images.flip(3), labels, sizes)
    every = [counts.get(c, 0) for c in range(compute.model.num_classes)]
    again = other.of_classes(params, images.flip(3), labels, every, cross_entropy)
    torch.testing.assert_close(again[:2], (loss, gradient), rtol=1e-8, atol=1e-11)
    present = torch.tensor(list(counts))
    for name, stack in real.items():
        torch.testing.assert_close(again[2][name][present], stack, rtol=1e-8, atol=1e-11)
        assert not again[2][name][2].any(), "of a class without samples"
    pixels = pixel_gradients(compute, params, images, counts, real)
    again = other.of_pixels(params)(images, labels, every, partial(towards, real=again[2]))
    torch.testing.assert_close(again, pixels, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(other.logits(params, images), compute.gradients.logits(params, images))


@pytest.mark.parametrize("shape", SHAPES)
def test_winograds_convolutions_give_the_same(shape, monkeypatch):
    """Equal to 1e-8 in float64, also where a micro-batch cuts a class in two; "matching" leaves the model's bits alone.

    Of these networks' convolutions between channels those with 16x16, 8x8 and 4x4 outputs are done so, 2x2 is not; the
    first block, where there are such, is done by its patches.
    """
    monkeypatch.setattr(winograd, "LEAST_CHANNELS", 2)
    usual, params, images, labels = network(shape)
    usual = replace(usual, winograd="never")
    counts = {0: 1, 1: 5, 3: 2, 4: 3}
    _, total, real = class_gradients(usual, params, images.flip(3), labels, list(counts.values()))
    pixels = pixel_gradients(usual, params, images, counts, real)
    for where, same in (("always", False), ("matching", True)):
        tiled = replace(usual, winograd=where)
        filters = tiled.gradients.tiled(params, matching=True)
        done = tiled.gradients.forward(params, images, filters)
        assert (done.first is None) == (0 in done.blocks) == (shape[2] == 1)
        takes = [place > 0 and block.h.shape[2] % 4 == 0 for place, block in done.blocks.items()]
        assert [block.tiles is not None for block in done.blocks.values()] == takes
        _, total_too, _ = class_gradients(tiled, params, images.flip(3), labels, list(counts.values()))
        for name, tensor in total.items():
            torch.testing.assert_close(total_too[name], tensor, rtol=1e-8, atol=1e-11)
        assert same == all(torch.equal(total_too[name], tensor) for name, tensor in total.items()) or not done.first
        found = pixel_gradients(tiled, params, images, counts, real)
        torch.testing.assert_close(found, pixels, rtol=1e-8, atol=1e-11)


def test_images_of_one_channel_lie_as_the_others():
    """Both layouts are the same memory then; what the first convolution returns has channels last all the same."""
    compute, params, images, _ = network((1, 8, 2))
    assert compute.gradients.forward(params, images).blocks[0].h.is_contiguous(memory_format=torch.channels_last)


def test_a_gradient_without_length_has_a_finite_derivative():
    """A dead filter (γ and β zero) has a gradient of zeros in all but the first block, as in autograd."""
    compute, params, images, labels = network((1, 8, 3))
    params["norm0.weight"][1] = params["norm0.bias"][1] = 0
    params["norm1.weight"][2] = params["norm1.bias"][2] = 0
    _, real = reference.gradient(compute.model, params, images[1:6].flip(3), labels[1:6])
    stacked = {n: t[None] for n, t in real.items() if t.ndim >= 2}
    found = pixel_gradients(compute, params, images[1:6], {1: 5}, stacked)
    expected = reference.pixel_gradient(compute.model, params, images[1:6], 1, real)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


def test_classes_that_share_a_pass_move_as_they_would_alone():
    """Four classes with micro-batches of 8 against one class at a time: the same pixels after two steps."""
    compute, params, images, labels = network((1, 8, 3), micro_batch=8)
    rows = {c: np.flatnonzero(labels.numpy() == c) for c in (0, 1, 3, 4)}
    _, _, real = class_gradients(compute, params, images.flip(3), labels, [1, 5, 2, 3])
    moved = [images.clone(), images.clone()]
    settings = PLAIN.__class__(**{**PLAIN.__dict__, "steps": 2})
    match(compute, params, moved[0], torch.zeros_like(images), matched(rows), real, settings)
    for place, (c, own) in enumerate(rows.items()):
        alone = {name: stack[place : place + 1] for name, stack in real.items()}
        match(compute, params, moved[1], torch.zeros_like(images), matched({c: own}), alone, settings)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-9, atol=1e-12)
    assert (moved[0] != images).flatten(1).any(1).all()


def test_micro_batches_by_hand():
    """Sizes 1, 5, 2 in pieces of 4: samples 0-3 hold all of the first and 3 of the second, 4-7 the rest."""
    assert list(micro_batches([1, 5, 2], 4)) == [
        (slice(0, 4), [(0, slice(0, 1)), (1, slice(1, 4))]),
        (slice(4, 8), [(1, slice(0, 2)), (2, slice(2, 4))]),
    ]


def test_neighbours_share_a_pass_as_far_as_they_fit():
    """At most 8 together: 3 + 4, then 9 alone, 2 + 2."""
    assert group_by_size([3, 4, 9, 2, 2], 8) == [range(0, 2), range(2, 3), range(3, 5)]


def test_convolutions_in_bfloat16_point_the_same_way():
    """Eight bits of mantissa: every tensor's gradient and the pixels' stay within a few degrees of float64's."""
    compute, params, images, labels = network((3, 32, 3), width=16)
    params = {name: tensor.float() for name, tensor in params.items()}
    short = replace(compute, half=torch.bfloat16)
    counts = [1, 5, 2, 3]
    _, exact, by_class = class_gradients(compute, params, images.float(), labels, counts)
    _, found, _ = class_gradients(short, params, images.float(), labels, counts)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert not torch.equal(found["conv1.weight"], exact["conv1.weight"])
    for name in by_class:
        assert torch.cosine_similarity(found[name].flatten(), exact[name].flatten(), dim=0) > 0.99
    turned = {name: stack.roll(1, 0) for name, stack in by_class.items()}
    by_label = {0: 1, 1: 5, 3: 2, 4: 3}
    pixels, shorter = (pixel_gradients(c, params, images.float(), by_label, turned) for c in (compute, short))
    assert torch.cosine_similarity(shorter.flatten(), pixels.flatten(), dim=0) > 0.98


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_passes_give_the_same_numbers():
    """Whole micro-batches of 4 are compiled, the last piece of 3 is not; float64, to rounding."""
    compute, params, images, labels = network((1, 8, 2), micro_batch=4)
    compiled = replace(compute, compiled=True)
    compiled.gradients.warm_up()
    loss, total, by_class = class_gradients(compute, params, images, labels, [1, 5, 2, 3])
    other_loss, other_total, other_by_class = class_gradients(compiled, params, images, labels, [1, 5, 2, 3])
    torch.testing.assert_close(other_loss, loss, rtol=1e-10, atol=1e-12)
    for name in params:
        torch.testing.assert_close(other_total[name], total[name], rtol=1e-8, atol=1e-11)
    for name in by_class:
        torch.testing.assert_close(other_by_class[name], by_class[name], rtol=1e-8, atol=1e-11)
    plain = (derivatives.forward, derivatives.backward)
    assert compiled.gradients._forward_backward(4, tiled=False) != plain
    assert (
        compiled.gradients._forward_backward(3, tiled=False)
        == compiled.gradients._forward_backward(4, tiled=True)
        == plain
    )
