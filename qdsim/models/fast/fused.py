"""Normalisation, ReLU and pooling of a block on a GPU: one kernel there, one back, and one each for the tangents.

Between two convolutions every operation of its own would read and write whole feature maps, and that is where a GPU's
time goes. Here a row of a kernel is a channel of an image: it is read once, with its mean and deviation, and what
pooling leaves of it is written. Four operations of torch, by name and device: on CUDA Triton's kernels, which come with
torch; on the CPU, and where there is no Triton or an image is too large for it, the same in plain torch, which is
also what the kernels are tested against.

Notation as in :mod:`derivatives`: z = w * x is a block's convolution, h its normalisation with r = 1/sqrt(var z + ε),
y = γ h + β, and the block's output is the mean of relu(y) over 2x2 positions. ``g`` is ∂L/∂y, ``dz`` the tangent of z.
Maps may be shorter numbers (bfloat16); sums and statistics are in those of γ.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.models.convnet import NORM_EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds for CPUs and for other machines come without it
    triton = None

_without: list[str] = []
"""Why this process does without the kernels, once it does."""
LARGEST = 4096
"""Positions of a map that a kernel takes at once: 64x64."""
AT_ONCE = 1024
"""Positions that a program takes: several rows, where maps are small."""


# -- in plain torch ----------------------------------------------------------------------------------------------------
def _normalised(z: Tensor, stats: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Return h, and r with room for positions."""
    mean, r = stats[..., None, None]
    return (z.to(gamma.dtype) - mean) * r, r


def _positive(h: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma[:, None, None] * h + beta[:, None, None] > 0


def _spread(pooled: Tensor, like: Tensor) -> Tensor:
    """Take a gradient back through pooling; an odd last row or column was not pooled."""
    n, c, height, width = pooled.shape
    spread = (pooled / 4)[:, :, :, None, :, None].expand(n, c, height, 2, width, 2).reshape(n, c, 2 * height, 2 * width)
    return F.pad(spread, (0, like.shape[3] - 2 * width, 0, like.shape[2] - 2 * height))


def _mean(u: Tensor) -> Tensor:
    return u.mean((2, 3), keepdim=True)


def forward_reference(z: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the block's output, and z's means and r, (2, n, channels)."""
    full = z.to(gamma.dtype)
    mean = full.mean((2, 3))
    r = ((full - mean[..., None, None]).square().mean((2, 3)) + NORM_EPS).rsqrt()
    stats = torch.stack([mean, r])
    h, _ = _normalised(z, stats, gamma)
    a = (gamma[:, None, None] * h + beta[:, None, None]).relu()
    return F.avg_pool2d(a, 2).to(z.dtype), stats


def backward_reference(z: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∂L/∂z from ∂L/∂output, and the sums of g and g h over positions, (2, n, channels)."""
    h, r = _normalised(z, stats, gamma)
    g = _spread(pooled.to(gamma.dtype), z) * _positive(h, gamma, beta)
    back = gamma[:, None, None] * r * (g - _mean(g) - h * _mean(g * h))
    return back.to(z.dtype), torch.stack([g.sum((2, 3)), (g * h).sum((2, 3))])


def tangent_reference(z: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, dz: Tensor) -> Tensor:
    """Return the tangent of the block's output."""
    h, r = _normalised(z, stats, gamma)
    dz = dz.to(gamma.dtype)
    dh = r * (dz - _mean(dz) - h * _mean(dz * h))
    return F.avg_pool2d(gamma[:, None, None] * dh * _positive(h, gamma, beta), 2).to(z.dtype)


def tangent_back_reference(
    z: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, dz: Tensor, pooled: Tensor, d_pooled: Tensor
) -> Tensor:
    """Return the tangent of ∂L/∂z from ∂L/∂output and its tangent.

    With N(u) = r (u - mean u - h mean(u h)), the derivative of normalisation, and g for γ g:
    d(N(g)) = N(dg) - r mean(h dz) N(g) - r (dh mean(g h) + h mean(g dh)).
    """
    h, r = _normalised(z, stats, gamma)
    dz = dz.to(gamma.dtype)
    mean_h = _mean(dz * h)
    dh = r * (dz - _mean(dz) - h * mean_h)
    scale = gamma[:, None, None] * _positive(h, gamma, beta)
    g, dg = (scale * _spread(p.to(gamma.dtype), z) for p in (pooled, d_pooled))
    mean_gh = _mean(g * h)
    back = dg - _mean(dg) - h * (_mean(dg * h) + _mean(g * dh)) - dh * mean_gh
    back -= mean_h * r * (g - _mean(g) - h * mean_gh)
    return (r * back).to(z.dtype)


SIZES = ["channels", "rows"]
"""Of a kernel's arguments those that would have it compiled again."""


# -- as kernels --------------------------------------------------------------------------------------------------------
if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _rows(stats, gamma, beta, channels, rows, ROWS: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return this program's rows, which of them there are, and their statistics."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        mean = tl.load(stats + row, mask=there, other=0).to(ACC)
        r = tl.load(stats + rows + row, mask=there, other=0).to(ACC)
        g = tl.load(gamma + row % channels, mask=there, other=0).to(ACC)
        b = tl.load(beta + row % channels, mask=there, other=0).to(ACC)
        return row, there, mean, r, g, b

    @triton.jit  # type: ignore[untyped-decorator]
    def _load(at, row, there, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load whole maps."""
        position = tl.arange(0, BLOCK)[None, :]
        return tl.load(at + row * (H * W) + position, mask=there & (position < H * W), other=0).to(ACC)

    @triton.jit  # type: ignore[untyped-decorator]
    def _load_spread(at, row, there, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load pooled maps, each number at the four positions that it was pooled from, a quarter of it each."""
        position = tl.arange(0, BLOCK)[None, :]
        y, x = position // W // 2, position % W // 2
        pooled = there & (y < H // 2) & (x < W // 2)
        return tl.load(at + row * ((H // 2) * (W // 2)) + y * (W // 2) + x, mask=pooled, other=0).to(ACC) * 0.25

    @triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
    def forward_kernel(  # type: ignore[no-untyped-def]
        z, gamma, beta, out, stats, channels, rows, EPS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr, ACC: tl.constexpr,
    ):  # fmt: skip
        """:func:`forward_reference`."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        there = row < rows
        position = tl.arange(0, BLOCK)[None, :]
        full = _load(z, row, there, H, W, BLOCK, ACC)
        mean = tl.sum(full, 1, keep_dims=True) / (H * W)
        apart = tl.where(position < H * W, full - mean, 0)
        r = 1 / tl.sqrt(tl.sum(apart * apart, 1, keep_dims=True) / (H * W) + EPS)
        tl.store(stats + row, mean, mask=there)
        tl.store(stats + rows + row, r, mask=there)
        g = tl.load(gamma + row % channels, mask=there, other=0).to(ACC)
        b = tl.load(beta + row % channels, mask=there, other=0).to(ACC)
        # the maps are in the cache now: read them again as pooling takes them
        place = tl.arange(0, POOLED)[None, :]
        pooled = there & (place < (H // 2) * (W // 2))
        corner = row * (H * W) + 2 * (place // (W // 2)) * W + 2 * (place % (W // 2))
        total = tl.zeros([ROWS, POOLED], ACC)
        for offset in tl.static_range(4):
            value = tl.load(z + corner + (offset // 2) * W + offset % 2, mask=pooled, other=0).to(ACC)
            y = g * ((value - mean) * r) + b
            total += tl.where(y <= 0, 0, y)  # what is not a number stays so
        tl.store(out + row * ((H // 2) * (W // 2)) + place, total * 0.25, mask=pooled)

    @triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
    def backward_kernel(  # type: ignore[no-untyped-def]
        z, stats, gamma, beta, pooled, out, sums, channels, rows, H: tl.constexpr, W: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
    ):  # fmt: skip
        """:func:`backward_reference`."""
        row, there, mean, r, gam, bet = _rows(stats, gamma, beta, channels, rows, ROWS, ACC)
        position = tl.arange(0, BLOCK)[None, :]
        h = tl.where(position < H * W, (_load(z, row, there, H, W, BLOCK, ACC) - mean) * r, 0)
        g = tl.where(gam * h + bet > 0, _load_spread(pooled, row, there, H, W, BLOCK, ACC), 0)
        sum_g, sum_gh = tl.sum(g, 1, keep_dims=True), tl.sum(g * h, 1, keep_dims=True)
        back = gam * r * (g - sum_g / (H * W) - h * (sum_gh / (H * W)))
        tl.store(out + row * (H * W) + position, back, mask=there & (position < H * W))
        tl.store(sums + row, sum_g, mask=there)
        tl.store(sums + rows + row, sum_gh, mask=there)

    @triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
    def tangent_kernel(  # type: ignore[no-untyped-def]
        z, stats, gamma, beta, dz, out, channels, rows, H: tl.constexpr, W: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, POOLED: tl.constexpr, ACC: tl.constexpr,
    ):  # fmt: skip
        """:func:`tangent_reference`."""
        row, there, mean, r, gam, bet = _rows(stats, gamma, beta, channels, rows, ROWS, ACC)
        position = tl.arange(0, BLOCK)[None, :]
        h = tl.where(position < H * W, (_load(z, row, there, H, W, BLOCK, ACC) - mean) * r, 0)
        full = _load(dz, row, there, H, W, BLOCK, ACC)
        mean_d, mean_h = tl.sum(full, 1, keep_dims=True) / (H * W), tl.sum(full * h, 1, keep_dims=True) / (H * W)
        place = tl.arange(0, POOLED)[None, :]
        pooled = there & (place < (H // 2) * (W // 2))
        corner = row * (H * W) + 2 * (place // (W // 2)) * W + 2 * (place % (W // 2))
        total = tl.zeros([ROWS, POOLED], ACC)
        for offset in tl.static_range(4):
            at = corner + (offset // 2) * W + offset % 2
            own = (tl.load(z + at, mask=pooled, other=0).to(ACC) - mean) * r
            dh = r * (tl.load(dz + at, mask=pooled, other=0).to(ACC) - mean_d - own * mean_h)
            total += tl.where(gam * own + bet > 0, gam * dh, 0)
        tl.store(out + row * ((H // 2) * (W // 2)) + place, total * 0.25, mask=pooled)

    @triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
    def tangent_back_kernel(  # type: ignore[no-untyped-def]
        z, stats, gamma, beta, dz, pooled, d_pooled, out, channels, rows, H: tl.constexpr, W: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
    ):  # fmt: skip
        """:func:`tangent_back_reference`."""
        row, there, mean, r, gam, bet = _rows(stats, gamma, beta, channels, rows, ROWS, ACC)
        position = tl.arange(0, BLOCK)[None, :]
        inside = position < H * W
        h = tl.where(inside, (_load(z, row, there, H, W, BLOCK, ACC) - mean) * r, 0)
        positive = gam * h + bet > 0
        full = _load(dz, row, there, H, W, BLOCK, ACC)
        mean_h = tl.sum(full * h, 1, keep_dims=True) / (H * W)
        dh = tl.where(inside, r * (full - tl.sum(full, 1, keep_dims=True) / (H * W) - h * mean_h), 0)
        g = tl.where(positive, gam * _load_spread(pooled, row, there, H, W, BLOCK, ACC), 0)
        mean_gh = tl.sum(g * h, 1, keep_dims=True) / (H * W)
        crossed = tl.sum(g * dh, 1, keep_dims=True) / (H * W)
        back = -dh * mean_gh - mean_h * r * (g - tl.sum(g, 1, keep_dims=True) / (H * W) - h * mean_gh) - h * crossed
        dg = tl.where(positive, gam * _load_spread(d_pooled, row, there, H, W, BLOCK, ACC), 0)
        back += dg - tl.sum(dg, 1, keep_dims=True) / (H * W) - h * (tl.sum(dg * h, 1, keep_dims=True) / (H * W))
        tl.store(out + row * (H * W) + position, r * back, mask=there & inside)


def sizes(z: Tensor, acc: torch.dtype, pools: bool = False) -> dict[str, Any]:
    """Return the sizes that a kernel is compiled for."""
    height, width = z.shape[2:]
    block = triton.next_power_of_2(height * width)
    found = {"H": height, "W": width, "ROWS": max(1, AT_ONCE // block), "BLOCK": block}
    if pools:
        found["POOLED"] = triton.next_power_of_2((height // 2) * (width // 2))
    found |= {"ACC": tl.float64 if acc == torch.float64 else tl.float32, "num_warps": max(4, block // 512)}
    return found | {"enable_fp_fusion": False}  # its default changes between versions of Triton


def _launch(kernel: Any, z: Tensor, arguments: list[Tensor], sizes: dict[str, Any]) -> None:
    n, channels = z.shape[:2]
    rows = n * channels
    with torch.cuda.device(z.device) if z.is_cuda else torch.no_grad():
        kernel[(triton.cdiv(rows, sizes["ROWS"]),)](*arguments, channels, rows, **sizes)


def suits(z: Tensor) -> bool:
    """Tell whether the kernels take such maps."""
    return bool(version()) and z.shape[2] * z.shape[3] <= LARGEST


def version() -> str:
    """Return the version of Triton whose kernels are in use; nothing where plain torch takes their place."""
    return "" if triton is None or _without else str(triton.__version__)


def why_without() -> str:
    """Say why the kernels are not in use."""
    return _without[0] if _without else "" if triton is not None else "this build of torch has no Triton"


def do_without(reason: str) -> None:
    """Have plain torch take the kernels' place in this process."""
    _without.append(reason)


def _pooled_like(z: Tensor) -> Tensor:
    n, channels, height, width = z.shape
    return z.new_empty(n, channels, height // 2, width // 2)


def _map_like(z: Tensor) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def forward_triton(z: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`forward_reference` as a kernel."""
    if not suits(z):
        return forward_reference(z, gamma, beta)
    out, stats = _pooled_like(z), gamma.new_empty(2, *z.shape[:2])
    _launch(
        forward_kernel, z, [z.contiguous(), gamma, beta, out, stats], sizes(z, gamma.dtype, True) | {"EPS": NORM_EPS}
    )
    return out, stats


def backward_triton(z: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`backward_reference` as a kernel."""
    if not suits(z):
        return backward_reference(z, stats, gamma, beta, pooled)
    out, sums = _map_like(z), torch.empty_like(stats)
    arguments = [z.contiguous(), stats, gamma, beta, pooled.contiguous(), out, sums]
    _launch(backward_kernel, z, arguments, sizes(z, gamma.dtype))
    return out, sums


def tangent_triton(z: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, dz: Tensor) -> Tensor:
    """:func:`tangent_reference` as a kernel."""
    if not suits(z):
        return tangent_reference(z, stats, gamma, beta, dz)
    out = _pooled_like(z)
    arguments = [z.contiguous(), stats, gamma, beta, dz.contiguous(), out]
    _launch(tangent_kernel, z, arguments, sizes(z, gamma.dtype, True))
    return out


def tangent_back_triton(
    z: Tensor, stats: Tensor, gamma: Tensor, beta: Tensor, dz: Tensor, pooled: Tensor, d_pooled: Tensor
) -> Tensor:
    """:func:`tangent_back_reference` as a kernel."""
    if not suits(z):
        return tangent_back_reference(z, stats, gamma, beta, dz, pooled, d_pooled)
    out = _map_like(z)
    maps = [z.contiguous(), stats, gamma, beta, dz.contiguous(), pooled.contiguous(), d_pooled.contiguous(), out]
    _launch(tangent_back_kernel, z, maps, sizes(z, gamma.dtype))
    return out


# -- as operations of torch --------------------------------------------------------------------------------------------
def _fake_forward(z: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return _pooled_like(z), gamma.new_empty(2, *z.shape[:2])


def _fake_backward(z: Tensor, stats: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return _map_like(z), torch.empty_like(stats)


def _fake_tangent(z: Tensor, *others: Tensor) -> Tensor:
    return _pooled_like(z)


def _fake_tangent_back(z: Tensor, *others: Tensor) -> Tensor:
    return _map_like(z)


LIBRARY: Any = torch.library.Library("qdsim", "FRAGMENT")  # type: ignore[no-untyped-call]
STATE = "Tensor z, Tensor stats, Tensor gamma, Tensor beta"
BACK = "Tensor dz, Tensor pooled, Tensor d_pooled"
SCHEMAS: dict[str, tuple[Callable[..., Any], ...]] = {
    "block(Tensor z, Tensor gamma, Tensor beta) -> (Tensor, Tensor)": (
        *(forward_reference, forward_triton, _fake_forward),
    ),
    f"block_back({STATE}, Tensor pooled) -> (Tensor, Tensor)": (
        *(backward_reference, backward_triton, _fake_backward),
    ),
    f"block_tangent({STATE}, Tensor dz) -> Tensor": (tangent_reference, tangent_triton, _fake_tangent),
    f"block_tangent_back({STATE}, {BACK}) -> Tensor": (
        *(tangent_back_reference, tangent_back_triton, _fake_tangent_back),
    ),
}
for schema, (reference, fused, fake) in SCHEMAS.items():
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, reference, "CPU")
    LIBRARY.impl(name, fused, "CUDA")
    torch.library.register_fake(f"qdsim::{name}", fake, lib=LIBRARY)

block = torch.ops.qdsim.block
block_back = torch.ops.qdsim.block_back
block_tangent = torch.ops.qdsim.block_tangent
block_tangent_back = torch.ops.qdsim.block_tangent_back
