"""The network's first block, by the statistics of its input's patches.

An image has one channel or three, so its 3x3 patches are short: 9 or 27 numbers, of which the block makes W = 128. All
that normalisation wants to know of the convolution follows from the patches' mean and covariance. With X the patches of
an image (positions, k), less their mean, S = XᵀX / positions and w the filters (k, width), z - mean z = X w and
var z = diag(wᵀ S w), and so γ h + β = X (w γ r) + β is a single product that writes the activations at once. On the way
back the products Xᵀ g replace all means over positions, and the tangents of matching are products of the same kind,
with filters that differ from image to image.

What a CPU saves are passes over memory, in the block that has four times as many positions as the next: at W = 128 an
eighth of the time that matching takes, where the filters are much more than a patch is long. With 32 filters and three
channels nothing is won. The numbers are those of :mod:`derivatives` up to rounding, which is no coarser; the
notation is the same.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.models.convnet import NORM_EPS


@dataclass(frozen=True)
class First:
    """The first block of one batch; tensors (n, ., width) where an image has its own filters or means."""

    shape: torch.Size
    """Of the images."""
    kernel: torch.Size
    padding: int
    patches: Tensor
    """X transposed, (n, k + 1, positions); the last row is one everywhere."""
    w: Tensor
    """(k, width)."""
    sw: Tensor
    """S w."""
    gamma: Tensor
    r: Tensor
    """(n, 1, width), as all means over positions."""
    a: Tensor
    """relu(γ h + β) as images."""


@dataclass(frozen=True)
class FirstBack:
    """The way back; g is ∂L/∂(γ h + β)."""

    g: Tensor
    """(n, positions, width)."""
    products: Tensor
    """Xᵀ g / positions."""
    mean: Tensor
    """Mean of g over positions."""
    mean_h: Tensor
    """Mean of g h."""


@dataclass(frozen=True)
class FirstTangent:
    """The way forwards with tangents, along each image's own v."""

    v: Tensor
    mean_h: Tensor
    """Mean of h dz."""
    d: Tensor
    """What makes dh = X d."""


def forward(x: Tensor, filters: Tensor, gamma: Tensor, beta: Tensor, padding: int) -> First:
    """Convolve, normalise, scale and rectify."""
    columns = F.unfold(x.contiguous(), filters.shape[2:], padding=padding)
    n, k, positions = columns.shape
    patches = columns.new_empty(n, k + 1, positions)
    torch.sub(columns, columns.mean(2, keepdim=True), out=patches[:, :k])
    patches[:, k] = 1
    inner = patches[:, :k]
    w = filters.reshape(-1, k).t().contiguous()
    sw = torch.matmul(torch.bmm(inner, inner.transpose(1, 2)) / positions, w)
    r = ((sw * w).sum(1, keepdim=True) + NORM_EPS).rsqrt_()
    products = torch.cat([w * (r * gamma), beta.expand_as(r)], 1)
    a = torch.bmm(patches.transpose(1, 2), products).relu_()
    height, width = (size + 2 * padding - side + 1 for size, side in zip(x.shape[2:], filters.shape[2:], strict=True))
    images = a.view(n, height, width, -1).permute(0, 3, 1, 2)
    return First(x.shape, filters.shape[2:], padding, patches, w, sw, gamma, r, images)


def backward(own: First, g: Tensor) -> FirstBack:
    """Find the means that ∂L/∂z = γ r (g - mean g - h mean(g h)) is made of; it is never formed."""
    flat = _flat(g)
    products, mean = _products(own, flat)
    return FirstBack(flat, products, mean, own.r * (products * own.w).sum(1, keepdim=True))


def weight_gradients(own: First, grads: FirstBack) -> Tensor:
    """Return ∂L/∂w of each image, (n, width, k)."""
    positions = grads.g.shape[1]
    found = (grads.products - own.sw * (own.r * grads.mean_h)) * (own.r * own.gamma * positions)
    return found.transpose(1, 2)


def tangent(own: First, filters: Tensor) -> tuple[FirstTangent, Tensor]:
    """Move w along each image's own v (n, width, ...); return the tangent and that of γ h + β, as images."""
    v = filters.reshape(len(filters), -1, own.w.shape[0]).transpose(1, 2)
    mean_h = own.r * (own.sw * v).sum(1, keepdim=True)
    d = own.r * (v - own.w * (own.r * mean_h))
    dy = torch.bmm(own.patches[:, :-1].transpose(1, 2), d * own.gamma)
    return FirstTangent(v, mean_h, d), dy.view(own.a.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)


def pixel_gradient(own: First, grads: FirstBack, forth: FirstTangent, dg: Tensor) -> Tensor:
    """Return the tangent of ∂L/∂x from ``dg``, that of g.

    It is d(∂L/∂z) wᵀ + ∂L/∂z vᵀ at each position, and then the patches are put together. With ∂L/∂z as in
    :func:`backward`, d(∂L/∂z) = γ r (dg - mean dg - h mean(dg h)) - r mean(h dz) ∂L/∂z - γ r dh mean(g h)
    - r h mean(γ g dh). Because h = X w r and dh = X d, all of it is g, dg, X and a constant, each times a small matrix.
    """
    flat = _flat(dg)
    w, r = own.w, own.r
    scale = r * own.gamma
    products, mean = _products(own, flat)
    mean_dgh = r * (products * w).sum(1, keepdim=True)
    crossed = own.gamma * (grads.products * forth.d).sum(1, keepdim=True)
    through = scale * (forth.v - w * (r * forth.mean_h))
    straight = scale * w
    on_h = straight * (r * mean_dgh) + w * (r * r * crossed) + forth.d * (scale * grads.mean_h)
    on_patches = -torch.matmul(on_h, w.t()) - torch.bmm(w * (r * grads.mean_h), through.transpose(1, 2))
    constant = -torch.bmm(mean, straight.transpose(1, 2)) - torch.bmm(grads.mean, through.transpose(1, 2))
    columns = torch.bmm(torch.cat([on_patches, constant], 1).transpose(1, 2), own.patches)
    columns.baddbmm_(straight, flat.transpose(1, 2)).baddbmm_(through, grads.g.transpose(1, 2))
    return F.fold(columns, own.shape[2:], own.kernel, padding=own.padding)


def _flat(images: Tensor) -> Tensor:
    """(n, width, height, width) with channels last in memory, as (n, positions, width)."""
    return images.permute(0, 2, 3, 1).flatten(1, 2)


def _products(own: First, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Xᵀ g / positions, and the mean of g."""
    found = torch.bmm(own.patches, flat) / flat.shape[1]
    return found[:, :-1], found[:, -1:]
