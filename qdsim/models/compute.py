"""What a process computes with: the network, the device, and how its passes are done."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from qdsim.models.convnet import ConvNet
from qdsim.models.fast import derivatives, winograd
from qdsim.models.numerics import Numerics
from qdsim.models.params import Params

CPU_MICRO_BATCH = 32
WHOLE_BATCH = 2**31

Forward = Callable[
    [ConvNet, Params, Tensor, bool, torch.dtype | None, derivatives.WinogradFilters | None], derivatives.ForwardCache
]
Backward = Callable[[derivatives.ForwardCache, Tensor], derivatives.BackwardCache]


@cache
def forward_backward(compiled: bool) -> tuple[Forward, Backward]:
    """Return the network's way forwards and its way back, as they are or compiled.

    Compiled, what lies between two convolutions is one kernel that passes over memory once.
    """
    if not compiled:
        return derivatives.forward, derivatives.backward
    return torch.compile(derivatives.forward), torch.compile(derivatives.backward)


@dataclass(frozen=True)
class Compute:
    """What a process computes with; the same for every client step it runs."""

    model: ConvNet
    device: torch.device
    micro_batch: int
    """Gradients are summed over pieces of this many samples. Part of the configuration: it moves bits."""
    half: torch.dtype | None = None
    """What convolutions are computed in, if not in float32."""
    compiled: bool = False
    """On a CPU whole micro-batches are compiled, and no other: each size would take its own half a minute."""
    winograd: Literal["matching", "always", "never"] = "matching"
    """Where wide convolutions on a CPU are done by ``fast/winograd.py``, the first block by ``fast/patches.py``; such
    passes are not compiled."""

    def tiled(self, params: Params, matching: bool = False) -> derivatives.WinogradFilters | None:
        """Return θ's filters transformed, where passes are to use them: once for all batches at this θ."""
        asked = self.winograd == "always" or (matching and self.winograd == "matching")
        if not asked or self.half is not None or not winograd.pays(self.model.width, self.device):
            return None
        return derivatives.transformed(self.model, params)

    def forward(
        self, params: Params, images: Tensor, tiled: derivatives.WinogradFilters | None = None
    ) -> derivatives.ForwardCache:
        """Run the network, with a way back."""
        return self._forward_backward(len(images), bool(tiled))[0](self.model, params, images, True, self.half, tiled)

    def backward(self, cache: derivatives.ForwardCache, g: Tensor) -> derivatives.BackwardCache:
        """Go back from ∂L/∂logits."""
        return self._forward_backward(len(g), bool(cache.tiled))[1](cache, g)

    def _forward_backward(self, size: int, tiled: bool) -> tuple[Forward, Backward]:
        fits = self.device.type != "cpu" or size == self.micro_batch
        return forward_backward(self.compiled and fits and not tiled)

    def warm_up(self) -> None:
        """Compile what will be needed, or find it in the compiler's cache."""
        if self.compiled and self.device.type == "cpu":
            params = self.model.init(torch.Generator())
            cache = self.forward(params, torch.zeros(self.micro_batch, self.model.channels, *2 * [self.model.size]))
            self.backward(cache, torch.zeros_like(cache.logits))


def make_compute(model: ConvNet, device: torch.device, numerics: Numerics) -> Compute:
    """Return what a process computes with; a micro-batch of ``auto`` is 32 on the CPU, where the cache is short."""
    micro_batch = CPU_MICRO_BATCH if device.type == "cpu" else WHOLE_BATCH
    if isinstance(numerics.micro_batch, int):
        micro_batch = numerics.micro_batch
    half = torch.bfloat16 if numerics.precision == "bfloat16" else None
    return Compute(model, device, micro_batch, half, numerics.compile, numerics.winograd)
