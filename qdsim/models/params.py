"""Arithmetic on model parameters θ, a dict of named tensors in a fixed order."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Params = dict[str, Tensor]
Arrays = dict[str, np.ndarray]


def clone(params: Params) -> Params:
    """Copy every tensor."""
    return {name: tensor.detach().clone() for name, tensor in params.items()}


def to(params: Params, device: torch.device) -> Params:
    """Move every tensor to ``device``, where it is not there already, all in one copy."""
    return dict(zip(params, move(list(params.values()), device), strict=True))


def move(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on ``device``. Between host and GPU those of a dtype go as one: each copy waits for the GPU."""
    moved = list(tensors)
    if all(tensor.device.type == device.type for tensor in moved):
        return moved
    for dtype in {tensor.dtype: None for tensor in moved}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        there = flat([tensors[place] for place in places]).to(device)
        for place, part in zip(places, unflat(there, [tensors[place] for place in places]), strict=True):
            moved[place] = part
    return moved


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all numbers of tensors of one dtype as one vector, a copy."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflat(numbers: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of :func:`flat`'s vector in the shapes that they had."""
    parts = numbers.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def put_back_(params: Params, before: Tensor, changes: Tensor) -> None:
    """In place: what ``before``, their :func:`flat`, says, unless ``changes``, a truth value on the device."""
    tensors = list(params.values())
    torch._foreach_copy_(tensors, unflat(torch.where(changes, flat(tensors), before), tensors))


def subtract(left: Params, right: Params) -> Params:
    """Return left - right."""
    return {name: left[name] - right[name] for name in left}


def step_(params: Params, gradient: Params, scale: float) -> None:
    """In place: params += scale * gradient (scale = -η descends, +η ascends)."""
    torch._foreach_add_(list(params.values()), [gradient[name] for name in params], alpha=scale)


def pull_(params: Params, anchor: Params, share: float) -> None:
    """In place: params += share * (anchor - params)."""
    torch._foreach_lerp_(list(params.values()), [anchor[name] for name in params], share)


class WeightedSum:
    """Σ w_i Δ_i in float64, in the order given: one sum and one update are all that is in memory at a time."""

    def __init__(self, like: Params):
        self.total: Params = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in like.items()}
        self.weight = 0.0
        """Σ w_i."""

    def add(self, weight: float, delta: Params) -> None:
        """Add one term."""
        self.weight += weight
        for name, tensor in self.total.items():
            tensor.add_(delta[name], alpha=weight)  # the product, too, is taken in float64


def add_weighted_mean(params: Params, deltas: Iterable[tuple[float, Params]]) -> Params:
    """Return params + Σ w_i Δ_i / Σ w_i, summed in the order given."""
    summed = WeightedSum(params)
    for weight, delta in deltas:
        summed.add(weight, delta)
    if summed.weight == 0:
        raise ValueError("the weighted mean of no updates is not defined")
    return {n: (t.to(torch.float64) + summed.total[n] / summed.weight).to(t.dtype) for n, t in params.items()}


def add_sums(params: Params, scaled: Sequence[tuple[float, WeightedSum]]) -> Params:
    """Return params + Σ factor · sum."""
    total = {n: t.to(torch.float64) for n, t in params.items()}
    for factor, summed in scaled:
        total = {name: tensor + factor * summed.total[name] for name, tensor in total.items()}
    return {n: total[n].to(t.dtype) for n, t in params.items()}


def size_bytes(params: Params) -> int:
    """Return how many bytes the parameters take on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in params.values())


def is_finite(params: Params) -> bool:
    """Tell whether no entry is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in params.values())


def sha256(params: Params) -> str:
    """Hash names, shapes and bits: equal exactly when the parameters are the same bits."""
    digest = hashlib.sha256()
    for name, array in to_numpy(params).items():
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def to_numpy(params: Params) -> Arrays:
    """Return numpy arrays on the CPU: what Ray moves without copying."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in params.items()}


@dataclass(frozen=True)
class PackedParams:
    """Parameters as one array, for a message: a dozen small arrays take longer to pickle than to send."""

    shapes: dict[str, tuple[int, ...]]
    numbers: np.ndarray | Arrays
    """All numbers in one array; the arrays as they are, where they differ in type."""


def pack(params: Params) -> PackedParams:
    """Return parameters as they are sent."""
    shapes = {name: tuple(tensor.shape) for name, tensor in params.items()}
    if len({tensor.dtype for tensor in params.values()}) != 1:
        return PackedParams(shapes, to_numpy(params))
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in params.values()])
    return PackedParams(shapes, flat.cpu().numpy())


def unpack(packed: PackedParams) -> Params:
    """Return tensors of their own: Ray's arrays are read-only views of shared memory."""
    shapes, numbers = packed.shapes, packed.numbers
    if not isinstance(numbers, np.ndarray):
        return from_numpy(numbers)
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.split_with_sizes(torch.from_numpy(np.array(numbers)), sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def from_numpy(arrays: Mapping[str, np.ndarray]) -> Params:
    """Return tensors of their own: Ray's arrays are read-only views of shared memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
