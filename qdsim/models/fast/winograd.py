"""3x3 convolutions with a quarter of the multiplications: Winograd's F(4x4, 3x3).

Lavin, Gray. Fast algorithms for convolutional neural networks. CVPR 2016: Y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A for each tile
of 6x6 inputs and 4x4 outputs, 36 multiplications where a convolution does 144. Over tiles and channels these are 36
matrix products. On one core they take half to two thirds of the time of the library's convolutions at 128 channels;
below 64 the transformations eat up what is won. A transformed tensor serves every product that it takes part in, and
sums are taken before they are transformed back. In float32 the error is five to seven times that of a convolution (2e-6
of the result's length, at 128 channels).

The way back from ∂L/∂Y is the adjoint, ∂L/∂x = B [(G w Gᵀ) ⊙ (A ∂L/∂Y Aᵀ)] Bᵀ, overlapping tiles added up: it takes the
same transformed filters, and the transformed ∂L/∂Y from which the filters' own gradient is made.

Images are (n, channels, height, width) with channels last in memory. Transformed, they are (36, tiles, channels); the
36 count columns of a tile first, then rows.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4
"""Outputs of a tile, each way."""
LEAST_CHANNELS = 64
G = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)


def pays(channels: int) -> bool:
    """Tell whether convolutions between so many channels are faster this way."""
    return channels >= LEAST_CHANNELS


def suits(images: Tensor, filters: Tensor, padding: int) -> bool:
    """Tell whether a convolution is of the kind that is done here, and faster so."""
    outputs, inputs, *kernel = filters.shape
    whole = images.shape[2] % TILE == 0 and images.shape[3] % TILE == 0
    return pays(min(inputs, outputs)) and whole and padding == 1 and kernel == [3, 3]


def of_images(x: Tensor) -> Tensor:
    """Bᵀ x B of each tile of a batch, padded by one."""
    n, channels, height, width = x.shape
    down, across = height // TILE, width // TILE
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    rows = x.new_empty(6, n, down, width + 2, channels)
    _times_b([padded[:, i : i + TILE * down : TILE] for i in range(6)], list(rows))
    found = x.new_empty(6, 6, n, down, across, channels)
    _times_b([rows[:, :, :, i : i + TILE * across : TILE] for i in range(6)], list(found))
    return found.view(36, -1, channels)


def to_images(m: Tensor, height: int, width: int) -> Tensor:
    """Aᵀ m A of each tile: the convolution, or the sum of several."""
    channels, down, across = m.shape[2], height // TILE, width // TILE
    tiles = m.view(6, 6, -1, down, across, channels)
    columns = m.new_empty(TILE, *tiles.shape[1:])
    _times_a(list(tiles), list(columns))
    found = m.new_empty(tiles.shape[2], down, TILE, across, TILE, channels)
    rows = [found[:, :, i].permute(3, 0, 1, 2, 4) for i in range(TILE)]
    _times_a([columns[:, i] for i in range(6)], rows)
    return found.view(-1, height, width, channels).permute(0, 3, 1, 2)


def of_filters(w: Tensor) -> Tensor:
    """G w Gᵀ of filters (outputs, inputs, 3, 3), as (36, inputs, outputs)."""
    return torch.mm(_kronecker(w.dtype), w.reshape(-1, 9).t()).view(36, *w.shape[:2]).transpose(1, 2)


def of_gradients(g: Tensor) -> Tensor:
    """A g Aᵀ of each tile of ∂L/∂(outputs): the adjoint of :func:`to_images`."""
    n, channels, height, width = g.shape
    down, across = height // TILE, width // TILE
    tiles = g.permute(0, 2, 3, 1).reshape(n, down, TILE, across, TILE, channels)
    rows = g.new_empty(6, n, down, across, TILE, channels)
    _times_a_turned([tiles[:, :, i] for i in range(TILE)], list(rows))
    found = g.new_empty(6, 6, n, down, across, channels)
    _times_a_turned([rows[..., i, :] for i in range(TILE)], list(found))
    return found.view(36, -1, channels)


def to_inputs(m: Tensor, height: int, width: int) -> Tensor:
    """B m Bᵀ of each tile, where they overlap added up, and without the padding: the adjoint of :func:`of_images`."""
    channels, down, across = m.shape[2], height // TILE, width // TILE
    tiles = m.view(6, 6, -1, down, across, channels)
    columns = m.new_empty(TILE, *tiles.shape[1:])
    _times_b_turned(list(tiles), list(columns), dim=3)
    found = m.new_empty(tiles.shape[2], down, TILE, across, TILE, channels)
    rows = [found[:, :, i].permute(3, 0, 1, 2, 4) for i in range(TILE)]
    _times_b_turned([columns[:, i] for i in range(6)], rows, dim=2)
    return found.view(-1, height, width, channels).permute(0, 3, 1, 2)


def add_to_filters(images: Tensor, gradients: Tensor, into: Tensor) -> None:
    """Add ∂L/∂w = Gᵀ (Σ over tiles of both transformed) G to ``into`` (outputs, inputs, 3, 3)."""
    products = torch.bmm(gradients.transpose(1, 2), images)
    into.view(-1, 9).add_(torch.mm(_kronecker(into.dtype).t(), products.view(36, -1)).t())


@cache
def _kronecker(dtype: torch.dtype) -> Tensor:
    """G for columns and rows at once, (36, 9)."""
    g = torch.tensor(G, dtype=torch.float64)
    return torch.einsum("ap,bq->bapq", g, g).reshape(36, 9).to(dtype)


def _times_b(d: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Bᵀ d, along one direction; what two of its rows share is formed once.

    Rows 1 and 2 are (d4 - 4 d2) ± (d3 - 4 d1), rows 3 and 4 (d4 - d2) ± 2 (d3 - d1), row 0 is 4 d0 - 5 d2 + d4, and
    row 5 is 4 d1 - 5 d3 + d5.
    """
    even, odd = torch.sub(d[4], d[2], alpha=4), torch.sub(d[3], d[1], alpha=4)
    torch.add(even, odd, out=into[1])
    torch.sub(even, odd, out=into[2])
    torch.sub(d[4], d[2], out=even)
    torch.sub(d[3], d[1], out=odd)
    torch.add(even, odd, alpha=2, out=into[3])
    torch.sub(even, odd, alpha=2, out=into[4])
    torch.add(even, d[0] - d[2], alpha=4, out=into[0])
    torch.sub(d[5] - d[3], odd, alpha=4, out=into[5])


def _times_b_turned(m: Sequence[Tensor], into: Sequence[Tensor], dim: int) -> None:
    """B m, along one direction, in which ``dim`` counts the tiles.

    Its rows are 4 m0, -4 (m1 - m2) - 2 (m3 - m4) + 4 m5, -5 m0 - 4 (m1 + m2) - (m3 + m4),
    (m1 - m2) + 2 (m3 - m4) - 5 m5, m0 + (m1 + m2) + (m3 + m4) and m5. The first lies on the previous tile's fifth, the
    last on the next one's second.
    """
    tiles = m[0].shape[dim] - 1
    one, two = m[1] - m[2], m[3] - m[4]
    torch.add(one, two, alpha=2, out=into[2]).sub_(m[5], alpha=5)
    one.add_(two, alpha=0.5)
    torch.sub(m[5], one, out=into[0]).mul_(4)
    into[0].narrow(dim, 1, tiles).add_(m[5].narrow(dim, 0, tiles))
    torch.add(m[1], m[2], out=one).add_(m[0])
    torch.add(m[3], m[4], out=two)
    torch.add(one, two, out=into[3])
    into[3].narrow(dim, 0, tiles).add_(m[0].narrow(dim, 1, tiles), alpha=4)
    torch.neg(two.add_(one, alpha=4).add_(m[0]), out=into[1])


def _times_a(m: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Aᵀ m, along one direction."""
    one, two = m[1] + m[2], m[3] + m[4]
    torch.add(one, two, alpha=4, out=into[2])
    one += m[0]
    torch.add(one, two, out=into[0])
    torch.sub(m[1], m[2], out=one)
    torch.sub(m[3], m[4], out=two)
    torch.add(one, two, alpha=2, out=into[1])
    one += m[5]
    torch.add(one, two, alpha=8, out=into[3])


def _times_a_turned(y: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """A y, along one direction."""
    even, odd = y[0] + y[2], y[1] + y[3]
    torch.add(even, odd, out=into[1])
    torch.sub(even, odd, out=into[2])
    torch.add(y[0], y[2], alpha=4, out=even)
    torch.add(y[1], y[3], alpha=4, out=odd)
    torch.add(even, odd, alpha=2, out=into[3])
    torch.sub(even, odd, alpha=2, out=into[4])
    into[0].copy_(y[0])
    into[5].copy_(y[3])
