"""Convolutions with a quarter of the multiplications are convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from qdsim.models.fast import winograd


def made(*shape, seed=0):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.contiguous(memory_format=torch.channels_last)


def convolved(images, filters):
    products = torch.bmm(winograd.of_images(images), winograd.of_filters(filters))
    return winograd.to_images(products, *images.shape[2:])


def test_one_tile_by_hand():
    """Ones with a filter of ones, padded: 9 inside, 6 at an edge, 4 in a corner."""
    found = convolved(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3))
    edge, inside = [4.0, 6.0, 6.0, 4.0], [6.0, 9.0, 9.0, 6.0]
    torch.testing.assert_close(found[0, 0], torch.tensor([edge, inside, inside, edge]))


@pytest.mark.parametrize(("height", "width"), [(4, 4), (8, 16), (12, 4)])
def test_all_three_products(height, width):
    """Forwards, back to the inputs, and the filters' gradient: PyTorch's, to 1e-12 in float64."""
    images, filters = made(3, 5, height, width), made(7, 5, 3, 3, seed=1)
    gradients = made(3, 7, height, width, seed=2)
    found = convolved(images, filters)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, F.conv2d(images, filters, padding=1), rtol=1e-12, atol=1e-12)
    back = torch.bmm(winograd.of_gradients(gradients), winograd.of_filters(filters).transpose(1, 2))
    expected = conv2d_input(images.shape, filters, gradients, padding=1)
    torch.testing.assert_close(winograd.to_inputs(back, height, width), expected, rtol=1e-12, atol=1e-12)
    summed = torch.ones(7, 5, 3, 3, dtype=torch.float64)
    winograd.add_to_filters(winograd.of_images(images), winograd.of_gradients(gradients), summed)
    expected = 1 + conv2d_weight(images, filters.shape, gradients, padding=1)
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)


def test_rounding_is_that_of_single_precision():
    """128 channels in float32 against float64: within 1e-5 of the largest output."""
    images, filters = made(2, 128, 16, 16), made(128, 128, 3, 3, seed=1)
    exact = F.conv2d(images, filters, padding=1)
    assert (convolved(images.float(), filters.float()) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "padding", "expected"),
    [(64, 16, 3, 1, True), (63, 16, 3, 1, False), (64, 14, 3, 1, False), (64, 16, 5, 1, False), (64, 16, 3, 3, False)],
)
def test_only_what_it_is_made_for(channels, size, kernel, padding, expected):
    """64 channels or more, whole tiles of four, 3x3 filters, a padding of one."""
    images, filters = torch.zeros(1, channels, size, size), torch.zeros(64, channels, kernel, kernel)
    assert winograd.suits(images, filters, padding) == expected
