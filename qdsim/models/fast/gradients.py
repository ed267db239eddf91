"""The ConvNet's gradients by its derivatives written out: the same numbers as autograd's, in a half to a third of the
time on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.models.convnet import ConvNet
from qdsim.models.fast import derivatives, winograd
from qdsim.models.gradients import Objective, PixelGradient, Towards, class_weights, is_matched, micro_batches
from qdsim.models.params import Params

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
class WrittenOut:
    """The gradients of a ConvNet on a CPU, and how its passes are done."""

    model: ConvNet
    micro_batch: int
    half: torch.dtype | None = None
    """What convolutions are computed in, if not in float32."""
    compiled: bool = False
    """Whole micro-batches are compiled, and no other: each size would take its own half a minute."""
    winograd: Literal["matching", "always", "never"] = "matching"
    """Where wide convolutions are done by ``winograd.py``, the first block by ``patches.py``; such passes are
    not compiled."""
    all_classes = False

    def logits(self, params: Params, images: Tensor) -> Tensor:
        """Run the network."""
        return derivatives.forward(self.model, params, images, keep=False).logits

    def of_classes(
        self, params: Params, images: Tensor, labels: Tensor, counts: Sequence[int], objective: Objective
    ) -> tuple[Tensor, Params, Params]:
        """All classes of a micro-batch in one pass; the products with weights are formed class by class."""
        by_class = {n: t.new_zeros(len(counts), *t.shape) for n, t in params.items() if is_matched(t)}
        total = {n: torch.zeros_like(t) for n, t in params.items() if not is_matched(t)}
        loss_sum = torch.zeros((), dtype=images.dtype, device=images.device)
        tiled = self.tiled(params)
        for batch, pieces in micro_batches(counts, self.micro_batch):
            cache = self.forward(params, images[batch], tiled)
            leaf = cache.logits.detach().requires_grad_()
            with torch.enable_grad():
                loss = objective(leaf, labels[batch])
            grads = self.backward(cache, torch.autograd.grad(loss, leaf)[0])
            derivatives.add_weight_gradients(cache, grads, pieces, by_class)
            derivatives.add_bias_gradients(cache, grads, total)
            loss_sum += loss.detach()
        total |= {n: stack.sum(0) if len(counts) > 1 else stack[0] for n, stack in by_class.items()}
        return loss_sum, {n: total[n] for n in params}, by_class

    def of_pixels(self, params: Params) -> PixelGradient:
        """Tangents along v, forwards and backwards (Pearlmutter's R operator)."""
        tiled = self.tiled(params, matching=True)

        def gradient(images: Tensor, labels: Tensor, counts: Sequence[int], towards: Towards) -> Tensor:
            weights = class_weights(labels, images.dtype)
            stacks = {n: t.new_zeros(len(counts), *t.shape) for n, t in params.items() if is_matched(t)}
            passes = []
            for batch, pieces in micro_batches(counts, self.micro_batch):
                cache = self.forward(params, images[batch], tiled)
                g = (cache.logits.softmax(1) - F.one_hot(labels[batch], self.model.num_classes)) * weights[batch, None]
                grads = self.backward(cache, g)
                derivatives.add_weight_gradients(cache, grads, pieces, stacks)
                passes.append((cache, grads, weights[batch], pieces))
            v = towards(stacks)
            return torch.cat([derivatives.pixel_gradient(*done[:3], v, done[3]) for done in passes])

        return gradient

    def warm_up(self) -> None:
        """Compile what will be needed, or find it in the compiler's cache."""
        if self.compiled:
            params = self.model.init(torch.Generator())
            cache = self.forward(params, torch.zeros(self.micro_batch, self.model.channels, *2 * [self.model.size]))
            self.backward(cache, torch.zeros_like(cache.logits))

    def tiled(self, params: Params, matching: bool = False) -> derivatives.WinogradFilters | None:
        """Return θ's filters transformed, where passes are to use them: once for all batches at this θ."""
        asked = self.winograd == "always" or (matching and self.winograd == "matching")
        if not asked or self.half is not None or not winograd.pays(self.model.width):
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
        return forward_backward(self.compiled and size == self.micro_batch and not tiled)
