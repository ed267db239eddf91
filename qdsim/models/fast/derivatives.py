"""The ConvNet's derivatives, written out: ∇_θ L, class by class where wanted, and the pixels' gradient in matching.

Autograd gives the same numbers (the tests hold both together in float64) and takes two to three times as long on a CPU:
its kernels for instance normalisation and pooling are slow in one memory layout or the other, and the gradient of a
gradient comes as a long chain of temporary tensors. Written out, everything stays in the layout in which convolutions
are fast, and all classes share one pass: instance normalisation does not couple samples, so only the products with
weights are formed class by class. A GPU goes another way (:mod:`cuda`).

Notation, for a block with input x: z = w * x + b is its convolution, h = (z - mean z) r with r = 1/sqrt(var z + ε) its
normalisation over the positions of a channel, a = relu(γ h + β), and pooling makes the next block's x. For a tensor u,
N(u) = r (u - mean u - h mean(u h)) is the derivative of normalisation; it is symmetric, so it serves forwards and
backwards. Because N removes means, the gradient of b is zero, exactly here and up to rounding in autograd.

Matching needs ∇_S d(∇_θ L^S, ∇_θ L^D). With v = ∂d/∂(∇_θ L^S) it is the derivative of ∇_S L^S(θ + t v) by t at 0: one
more pass forwards and one backwards that carry tangents (Pearlmutter's R operator, a dot in names below: ``dz``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from qdsim.models.convnet import NORM_EPS, ConvNet
from qdsim.models.fast import patches, winograd
from qdsim.models.gradients import Pieces
from qdsim.models.params import Params

WinogradFilters = dict[int, Tensor]
"""A block's filters transformed."""


def channels_last(tensor: Tensor) -> Tensor:
    """Return images or filters in the memory layout in which convolutions are fast: channels last."""
    found = tensor.contiguous(memory_format=torch.channels_last)
    if found.shape[1] != 1:
        return found
    # one channel lies in memory the same way in both layouts: without these strides it would be taken for the slow one
    height, width = found.shape[2:]
    return found.as_strided(found.shape, (height * width, 1, width, 1))


@dataclass(frozen=True)
class _Block:
    x: Tensor
    h: Tensor
    r: Tensor
    """(n, width, 1, 1), as all means over positions."""
    a: Tensor
    padding: int
    half: torch.dtype | None
    """What convolutions are computed in, where it is not the dtype of everything else."""
    tiles: Tensor | None
    """x transformed, where the block's convolutions are done by :mod:`winograd`."""


@dataclass(frozen=True)
class _Back:
    """What :func:`backward` finds at a block; g is ∂L/∂(γ h + β)."""

    pooled: Tensor
    """∂L/∂(pooled a)."""
    z: Tensor
    """∂L/∂z."""
    scale: Tensor
    """γ r."""
    mean: Tensor
    """Mean of g over positions."""
    mean_h: Tensor
    """Mean of g h."""
    tiles: Tensor | None
    """∂L/∂z transformed, where x is."""


@dataclass(frozen=True)
class ForwardCache:
    """One batch's way through the network: what is needed for the way back."""

    params: Params
    """Filters in the fast layout."""
    tiled: WinogradFilters
    first: patches.First | None
    """The first block, where it is done by :mod:`patches`."""
    blocks: dict[int, _Block]
    """The others, by number."""
    shape: torch.Size
    """Of the last pooled activations."""
    features: Tensor
    logits: Tensor


@dataclass(frozen=True)
class BackwardCache:
    """The way back."""

    logits: Tensor
    """∂L/∂logits."""
    first: patches.FirstBack | None
    """As the first block is done, so it goes back."""
    blocks: dict[int, _Back]


def transformed(model: ConvNet, params: Params) -> WinogradFilters:
    """Return the filters of all blocks but the first as :mod:`winograd` takes them: once for many batches."""
    return {block: winograd.of_filters(params[f"conv{block}.weight"]) for block in range(1, model.depth)}


def forward(
    model: ConvNet,
    params: Params,
    images: Tensor,
    keep: bool = True,
    half: torch.dtype | None = None,
    tiled: WinogradFilters | None = None,
) -> ForwardCache:
    """Run the network on normalised images (n, c, h, w); without ``keep`` there is no way back.

    ``half``: a shorter dtype for the convolutions, here and on the way back; sums and means stay in the images' own.
    ``tiled``: what :func:`transformed` returns; convolutions are then done by :mod:`winograd`, here and back, the
    first block by :mod:`patches`.
    """
    params = {name: channels_last(tensor) if tensor.ndim == 4 else tensor for name, tensor in params.items()}
    x = channels_last(images)
    first: patches.First | None = None
    blocks: dict[int, _Block] = {}
    for block in range(model.depth):
        padding = model.first_padding if block == 0 else 1
        filters = params[f"conv{block}.weight"]
        if tiled and block == 0:
            first = patches.forward(images, filters, params["norm0.weight"], params["norm0.bias"], padding)
            x = F.avg_pool2d(first.a, 2)
            continue
        tiles = winograd.of_images(x) if tiled and winograd.suits(x, filters, padding) else None
        if tiled is None or tiles is None:
            h = _convolution(x, filters, padding, half, params[f"conv{block}.bias"])
        else:  # without its bias, which normalisation takes away again
            h = winograd.to_images(torch.bmm(tiles, tiled[block]), *x.shape[2:])
        h -= _mean(h)
        r = (_mean(h * h) + NORM_EPS).rsqrt_()
        h *= r
        a = torch.addcmul(_channel(params[f"norm{block}.bias"]), h, _channel(params[f"norm{block}.weight"])).relu_()
        if keep:
            blocks[block] = _Block(x, h, r, a, padding, half, tiles)
        x = F.avg_pool2d(a, 2)
    features = x.flatten(1)
    logits = F.linear(features, params["linear.weight"], params["linear.bias"])
    return ForwardCache(params, tiled or {}, first if keep else None, blocks, x.shape, features, logits)


def backward(cache: ForwardCache, g: Tensor) -> BackwardCache:
    """Go back from ∂L/∂logits to every block's convolution."""
    found: dict[int, _Back] = {}
    pooled = channels_last((g @ cache.params["linear.weight"]).view(cache.shape))
    for block, own in reversed(cache.blocks.items()):
        u = _unpool(own.a, pooled)
        mean, mean_h = _mean(u), _mean(u * own.h)
        scale = own.r * _channel(cache.params[f"norm{block}.weight"])
        torch.addcmul(-scale * mean, u, scale, out=u).addcmul_(own.h, -scale * mean_h)
        tiles = winograd.of_gradients(u) if own.tiles is not None else None
        found[block] = _Back(pooled, u, scale, mean, mean_h, tiles)
        if tiles is not None:
            pooled = winograd.to_inputs(torch.bmm(tiles, cache.tiled[block].transpose(1, 2)), *own.x.shape[2:])
        elif block:
            pooled = _to_input(own, own.x, cache.params[f"conv{block}.weight"], u)
    first = patches.backward(cache.first, _unpool(cache.first.a, pooled)) if cache.first else None
    return BackwardCache(g, first, found)


def add_weight_gradients(cache: ForwardCache, grads: BackwardCache, pieces: Pieces, into: Params) -> None:
    """Add ∂L/∂θ of each class to its place in ``into``: the tensors that matching looks at, stacked over classes."""
    if cache.first and grads.first:
        of_images = patches.weight_gradients(cache.first, grads.first)
        for place, part in pieces:
            into["conv0.weight"][place] += of_images[part].sum(0).view_as(into["conv0.weight"][place])
    for block, own in cache.blocks.items():
        _add_to_filters(own, grads.blocks[block], pieces, into[f"conv{block}.weight"])
    for place, part in pieces:
        into["linear.weight"][place].addmm_(grads.logits[part].t(), cache.features[part])


def add_bias_gradients(cache: ForwardCache, grads: BackwardCache, into: Params) -> None:
    """Add ∂L/∂θ of γ, β and the classifier's bias, over all samples; that of a convolution's bias is zero."""
    ways: list[tuple[int, Tensor, _Back | patches.FirstBack]]
    ways = [(block, own.a, grads.blocks[block]) for block, own in cache.blocks.items()]
    if cache.first and grads.first:
        ways.append((0, cache.first.a, grads.first))
    for block, a, g in ways:
        positions = a.shape[2] * a.shape[3]
        into[f"norm{block}.weight"] += g.mean_h.sum(0).flatten() * positions
        into[f"norm{block}.bias"] += g.mean.sum(0).flatten() * positions
    into["linear.bias"] += grads.logits.sum(0)


def pixel_gradient(cache: ForwardCache, grads: BackwardCache, weights: Tensor, v: Params, pieces: Pieces) -> Tensor:
    """∇_S Σ_c ⟨∇_θ L^{S^c}(θ), v_c⟩ with L the cross-entropy, its samples weighted by ``weights`` (n,).

    ``v`` is stacked over classes.
    """
    params = cache.params
    # forwards, with tangents: θ moves along v, the pixels stay
    dx: Tensor | None = None
    forth: patches.FirstTangent | None = None
    if cache.first:
        filters = v["conv0.weight"][_places(pieces)]
        forth, dy = patches.tangent(cache.first, filters)
        dx = F.avg_pool2d(_rectified(dy, cache.first.a, dy), 2)
    tangents = {}
    for block, own in cache.blocks.items():
        u = _tangent(cache, block, dx, v[f"conv{block}.weight"], pieces)
        mean_h = _mean(u * own.h)
        torch.addcmul(-own.r * _mean(u), u, own.r, out=u).addcmul_(own.h, -own.r * mean_h)
        dx = F.avg_pool2d(_rectified(u, own.a, torch.empty_like(u)), 2).mul_(_channel(params[f"norm{block}.weight"]))
        tangents[block] = (u, mean_h, dx)
    assert dx is not None
    # the classifier and the loss: the derivative of the softmax p is diag p - p pᵀ
    matrix, matrices = params["linear.weight"], v["linear.weight"]
    d_logits, d_features = dx.flatten(1) @ matrix.t(), torch.zeros_like(cache.features)
    for place, part in pieces:
        d_logits[part] += cache.features[part] @ matrices[place].t()
        d_features[part] = grads.logits[part] @ matrices[place]
    p = cache.logits.softmax(1)
    d_g = p * d_logits
    d_g = (d_g - p * d_g.sum(1, keepdim=True)) * weights[:, None]
    pooled = channels_last((d_features + d_g @ matrix).view(cache.shape))
    # backwards, with tangents
    for block in reversed(cache.blocks):
        own, g = cache.blocks[block], grads.blocks[block]
        u = _back_through_norm(own, g, pooled, *tangents[block])
        if block == 0:
            return _to_pixels(own, g, u, params["conv0.weight"], v["conv0.weight"], pieces)
        pooled = _tangent_back(cache, block, g, u, v[f"conv{block}.weight"], pieces)
    assert cache.first
    assert grads.first
    assert forth
    return patches.pixel_gradient(cache.first, grads.first, forth, _unpool(cache.first.a, pooled))


def _tangent(cache: ForwardCache, block: int, dx: Tensor | None, filters: Tensor, pieces: Pieces) -> Tensor:
    """Return dz = v * x + w * dx, with each class's own v in ``filters``; the pixels themselves have no dx."""
    own = cache.blocks[block]
    if own.tiles is None or dx is None:
        dz = _convolve(own, filters, pieces)
        w = cache.params[f"conv{block}.weight"]
        return dz if dx is None else dz.add_(_convolution(dx, w, own.padding, own.half))
    products = torch.bmm(winograd.of_images(dx), cache.tiled[block])
    for place, tiles in _tiles(own.tiles, own.x, pieces):
        products[:, tiles].baddbmm_(own.tiles[:, tiles], winograd.of_filters(filters[place]))
    return winograd.to_images(products, *own.x.shape[2:])


def _tangent_back(cache: ForwardCache, block: int, g: _Back, dg: Tensor, filters: Tensor, pieces: Pieces) -> Tensor:
    """Return the tangent of ∂L/∂x from ``dg``, that of ∂L/∂z."""
    own = cache.blocks[block]
    if g.tiles is None:
        dx = _to_input(own, own.x, cache.params[f"conv{block}.weight"], dg)
        _add_to_input(own, filters, g.z, pieces, dx)
        return dx
    products = torch.bmm(winograd.of_gradients(dg), cache.tiled[block].transpose(1, 2))
    for place, tiles in _tiles(g.tiles, own.x, pieces):
        products[:, tiles].baddbmm_(g.tiles[:, tiles], winograd.of_filters(filters[place]).transpose(1, 2))
    return winograd.to_inputs(products, *own.x.shape[2:])


def _to_pixels(own: _Block, g: _Back, dg: Tensor, kernel: Tensor, filters: Tensor, pieces: Pieces) -> Tensor:
    """The same at the first block: so few channels come slowly out of a convolution, so a product and a fold do it."""
    columns = torch.matmul(kernel.reshape(len(kernel), -1).t(), dg.flatten(2))
    for place, part in pieces:
        columns[part] += torch.matmul(filters[place].reshape(len(kernel), -1).t(), g.z[part].flatten(2))
    return F.fold(columns, own.x.shape[2:], kernel.shape[2:], padding=own.padding)


def _tiles(transformed: Tensor, x: Tensor, pieces: Pieces) -> Pieces:
    """Return the pieces of a batch as pieces of its tiles."""
    each = transformed.shape[1] // len(x)
    return [(place, slice(part.start * each, part.stop * each)) for place, part in pieces]


def _convolve(own: _Block, filters: Tensor, pieces: Pieces) -> Tensor:
    """Convolve each class's samples with its own filters."""
    return torch.cat([_convolution(own.x[part], filters[place], own.padding, own.half) for place, part in pieces])


def _add_to_filters(own: _Block, g: _Back, pieces: Pieces, into: Tensor) -> None:
    """Add ∂L/∂w of each class at its place in ``into`` (classes, width, channels, 3, 3)."""
    if own.tiles is not None and g.tiles is not None:
        for place, tiles in _tiles(own.tiles, own.x, pieces):
            winograd.add_to_filters(own.tiles[:, tiles], g.tiles[:, tiles], into[place])
        return
    for place, part in pieces:
        into[place] += _to_filters(own, own.x[part], into.shape[1:], g.z[part])


def _add_to_input(own: _Block, filters: Tensor, g_z: Tensor, pieces: Pieces, into: Tensor) -> None:
    """Add what goes back through each class's own filters to the block's input."""
    for place, part in pieces:
        into[part] += _to_input(own, own.x[part], filters[place], g_z[part])


def _places(pieces: Pieces) -> Tensor:
    """Return each sample's place in the stack."""
    sizes = torch.tensor([part.stop - part.start for _, part in pieces])
    return torch.tensor([place for place, _ in pieces]).repeat_interleave(sizes)


def _back_through_norm(own: _Block, g: _Back, pooled: Tensor, dh: Tensor, mean_h: Tensor, dx: Tensor) -> Tensor:
    """Return the tangent of ∂L/∂z from that of ∂L/∂(pooled a).

    With g for γ g: d(N(g)) = N(dg) - r mean(h dz) N(g) - r (dh mean(g h) + h mean(g dh)). The last mean needs no pass
    over the positions: pooling has summed it already.
    """
    u = _unpool(own.a, pooled)
    crossed = (g.pooled * dx).sum((2, 3), keepdim=True) / (u.shape[2] * u.shape[3])
    mean_uh = _mean(u * own.h)
    torch.addcmul(-g.scale * _mean(u), u, g.scale, out=u)
    u.addcmul_(own.h, -g.scale * mean_uh - own.r * crossed)
    return u.addcmul_(g.z, -own.r * mean_h).addcmul_(dh, -g.scale * g.mean_h)


def _convolution(
    x: Tensor, filters: Tensor, padding: int, half: torch.dtype | None, bias: Tensor | None = None
) -> Tensor:
    if half is None:
        return F.conv2d(x, filters, bias, padding=padding)
    # normalisation takes a bias away again, so there is nothing to add in the shorter numbers
    return _product(lambda a, b: F.conv2d(a, b, padding=padding), half, x, filters)


def _to_input(own: _Block, x: Tensor, filters: Tensor, g_z: Tensor) -> Tensor:
    def back(filters: Tensor, g_z: Tensor) -> Tensor:
        found: Tensor = conv2d_input(x.shape, filters, g_z, padding=own.padding)  # type: ignore[no-untyped-call]
        return found

    return _product(back, own.half, filters, g_z)


def _to_filters(own: _Block, x: Tensor, shape: torch.Size, g_z: Tensor) -> Tensor:
    def back(x: Tensor, g_z: Tensor) -> Tensor:
        found: Tensor = conv2d_weight(x, shape, g_z, padding=own.padding)  # type: ignore[no-untyped-call]
        return found

    return _product(back, own.half, x, g_z)


def _product(product: Callable[[Tensor, Tensor], Tensor], half: torch.dtype | None, a: Tensor, b: Tensor) -> Tensor:
    """Multiply in a shorter dtype, where one is given; the result has the dtype of the factors."""
    if half is None:
        return product(a, b)
    return product(a.to(half), b.to(half)).to(a.dtype)


def _unpool(a: Tensor, pooled: Tensor) -> Tensor:
    """Take ∂L/∂(pooled a) back through pooling and ReLU."""
    spread = torch.ops.aten.avg_pool2d_backward(pooled, a, [2, 2], [2, 2], [0, 0], False, True, None)
    return _rectified(spread, a, spread)


def _rectified(u: Tensor, a: Tensor, out: Tensor) -> Tensor:
    """The derivative of ReLU: u where a is positive, else zero."""
    found: Tensor = torch.ops.aten.threshold_backward.grad_input(u, a, 0, grad_input=out)
    return found


def _mean(u: Tensor) -> Tensor:
    return u.mean((2, 3), keepdim=True)


def _channel(values: Tensor) -> Tensor:
    return values[:, None, None]
