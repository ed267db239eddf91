"""The first block by its patches is the first block."""

import pytest
import torch
import torch.nn.functional as F

from qdsim.models.convnet import NORM_EPS
from qdsim.models.fast import patches


def block(images, filters, gamma, beta, padding):
    """The definition: convolution, instance normalisation, ReLU."""
    normal = F.group_norm(F.conv2d(images, filters, padding=padding), len(filters), gamma, beta, NORM_EPS)
    return normal.relu()


def made(channels, size, dtype=torch.float64):
    """Images, filters, γ, β and a gradient of the outputs."""
    draws = torch.Generator().manual_seed(size)
    shapes = [(4, channels, size, size), (6, channels, 3, 3), (6,), (6,)]
    return [torch.randn(*shape, generator=draws, dtype=torch.float64).to(dtype) for shape in shapes]


def test_two_by_two_pixels_by_hand():
    """A filter that takes the pixel itself; pixels 1, -1, -1, 1 are normalised already; γ = 2 and β = 1.

    γ h + β is 3, -1, -1, 3. With g = 1 at the first pixel mean g = mean(g h) = 1/4, so that
    ∂L/∂z = 2 (g - 1/4 - h/4) = 1, 0, 0, -1. A tap of the filter gets what it lies on at the first pixel less what it
    lies on at the last: the middle 1 - 1, the upper left corner 0 - 1 (the first is in the padding), the lower right
    one 1 - 0, the taps above and left of the middle 0 - (-1), those below and right of it -1 - 0, the other corners 0.
    """
    images = torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]], dtype=torch.float64)
    filters = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    filters[0, 0, 1, 1] = 1
    own = patches.forward(images, filters, torch.tensor([2.0]).double(), torch.tensor([1.0]).double(), padding=1)
    torch.testing.assert_close(own.a.flatten().tolist(), [3.0, 0.0, 0.0, 3.0], rtol=0, atol=2e-5)
    g = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]], dtype=torch.float64)
    found = patches.weight_gradients(own, patches.backward(own, g)).view(3, 3)
    expected = torch.tensor([[-1.0, 1, 0], [1, 0, -1], [0, -1, 1]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # ε is 1e-5 of the variance


@pytest.mark.parametrize(("channels", "size", "padding"), [(1, 28, 3), (3, 32, 1), (2, 5, 1)])
def test_a_block_and_its_gradients(channels, size, padding):
    """Against autograd, image by image."""
    images, filters, gamma, beta = made(channels, size)
    own = patches.forward(images, filters, gamma, beta, padding)
    filters.requires_grad_()
    expected = block(images, filters, gamma, beta, padding)
    torch.testing.assert_close(own.a, expected.detach(), rtol=1e-10, atol=1e-12)
    assert own.a.is_contiguous(memory_format=torch.channels_last)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    behind = (g * (own.a > 0)).contiguous(memory_format=torch.channels_last)
    found = patches.weight_gradients(own, patches.backward(own, behind))
    for image in range(len(images)):
        (gradient,) = torch.autograd.grad(expected[image], filters, g[image], retain_graph=True)
        torch.testing.assert_close(found[image].reshape(filters.shape), gradient, rtol=1e-8, atol=1e-11)


def test_an_image_of_one_colour():
    """Its patches have no variance away from the padding, nor has padding itself any where the image is black."""
    images, filters, gamma, beta = made(1, 8)
    images[0] = 0
    own = patches.forward(images, filters, gamma, beta, padding=1)
    torch.testing.assert_close(own.a, block(images, filters, gamma, beta, 1), rtol=1e-10, atol=1e-12)
    assert torch.equal(own.a[0], beta.relu()[:, None, None].expand(-1, 8, 8))


def test_rounding_is_no_coarser_than_a_convolutions():
    """In float32, bright images (mean 5) included: at most twice the error of the definition, against float64."""
    images, filters, gamma, beta = made(3, 32)
    images += 5
    exact = block(images, filters, gamma, beta, 1)
    single = [tensor.float() for tensor in (images, filters, gamma, beta)]
    usual = (block(*single, 1) - exact).abs().max()
    assert (patches.forward(*single, 1).a - exact).abs().max() < 2 * usual
