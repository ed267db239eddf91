"""What algorithms ask of a network's derivatives, and autograd's answer, which serves any network.

A batch is sorted by class, and the gradient of each class is wanted by itself. That is one pass over the batch, class
by class, because no sample sees another; a network whose samples do (batch normalisation) is refused when a job is
planned (``models/module.py``). Matching asks for the pixels' gradient of ⟨∇_θ L, v⟩: a gradient of a gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qdsim.models.model import Model
from qdsim.models.params import Params

Objective = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels to the summed loss."""
Towards = Callable[[Params], Params]
"""The classes' gradients ∇_θ L^{S^c}, stacked, to v = ∂d/∂(∇_θ L^{S^c}), stacked alike."""
PixelGradient = Callable[[Tensor, Tensor, Sequence[int], Towards], Tensor]
"""``(images, labels, counts, towards)``: ∇_S Σ_c ⟨∇_θ L^{S^c}(θ), v_c⟩, with L the mean cross-entropy of the class's
images, for images sorted by class, ``counts`` of each; v is held fixed."""
Pieces = Sequence[tuple[int, slice]]
"""Of a batch that is sorted by class: the class's place in a stack, and its samples."""


class Gradients(Protocol):
    """A network's derivatives, on one device."""

    @property
    def all_classes(self) -> bool:
        """Whether a batch by class has all of the network's, with 0 samples of those that are missing.

        Shapes then do not depend on what was drawn, and nothing but tensors differs between batches of one size.
        """

    def logits(self, params: Params, images: Tensor) -> Tensor:
        """Return the network's answers, with no way back."""

    def of_classes(
        self, params: Params, images: Tensor, labels: Tensor, counts: Sequence[int], objective: Objective
    ) -> tuple[Tensor, Params, Params]:
        """Return the summed loss and ∇_θ loss of a batch, and the latter for each class, stacked.

        The batch is sorted by class, ``counts`` samples each; sums go over micro-batches in order. Only tensors that
        matching looks at (two dimensions or more) are kept by class.
        """

    def of_pixels(self, params: Params) -> PixelGradient:
        """Return the pixels' gradient at one θ; what depends on θ alone is done once."""

    def warm_up(self) -> None:
        """Do what the first step would have to wait for."""


def micro_batches(counts: Sequence[int], size: int) -> Iterator[tuple[slice, Pieces]]:
    """Cut a batch that is sorted by class into pieces of ``size`` samples; say where each has which classes."""
    ends = np.cumsum(counts)
    for start in range(0, int(ends[-1]), size):
        stop = min(start + size, int(ends[-1]))
        pieces = []
        for place in range(int(np.searchsorted(ends, start, side="right")), len(counts)):
            first, last = max(start, int(ends[place]) - counts[place]), min(stop, int(ends[place]))
            if first >= stop:
                break
            if first < last:
                pieces.append((place, slice(first - start, last - start)))
        yield slice(start, stop), pieces


def is_matched(tensor: Tensor) -> bool:
    """Tell whether matching looks at a parameter: biases and the like do not enter the distance."""
    return tensor.ndim >= 2


def class_weights(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each image the weight 1 / (images of its class) that makes sums into means."""
    return 1 / (labels[:, None] == labels).sum(1).to(dtype)


@dataclass(frozen=True)
class Autograd:
    """The derivatives of any network, as autograd finds them."""

    model: Model
    device: torch.device
    micro_batch: int
    half: torch.dtype | None = None
    """What autocast computes matrix products and convolutions in, if not in float32."""
    all_classes = False

    def logits(self, params: Params, images: Tensor) -> Tensor:
        """Run the network."""
        with torch.no_grad():
            return self.model.forward(params, images)

    def of_classes(
        self, params: Params, images: Tensor, labels: Tensor, counts: Sequence[int], objective: Objective
    ) -> tuple[Tensor, Params, Params]:
        """One pass forwards and back for each class of each micro-batch."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        by_class = {n: t.new_zeros(len(counts), *t.shape) for n, t in params.items() if is_matched(t)}
        total = {n: torch.zeros_like(t) for n, t in params.items() if not is_matched(t)}
        loss_sum = torch.zeros((), dtype=images.dtype, device=images.device)
        for batch, pieces in micro_batches(counts, self.micro_batch):
            for place, part in pieces:
                with torch.enable_grad():
                    loss = objective(self._forward(leaves, images[batch][part]), labels[batch][part])
                found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
                for name, gradient in zip(leaves, found, strict=True):
                    (by_class[name][place] if name in by_class else total[name]).add_(gradient)
                loss_sum += loss.detach()
        total |= {n: stack.sum(0) if len(counts) > 1 else stack[0] for n, stack in by_class.items()}
        return loss_sum, {n: total[n] for n in params}, by_class

    def of_pixels(self, params: Params) -> PixelGradient:
        """A double backward for each class of each micro-batch."""
        leaves = {name: tensor.detach().requires_grad_(is_matched(tensor)) for name, tensor in params.items()}
        matched = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}

        def gradient(images: Tensor, labels: Tensor, counts: Sequence[int], towards: Towards) -> Tensor:
            weights = class_weights(labels, images.dtype)
            stacks = {name: leaf.new_zeros(len(counts), *leaf.shape) for name, leaf in matched.items()}
            passes: list[tuple[int, Tensor, tuple[Tensor, ...]]] = []
            for batch, pieces in micro_batches(counts, self.micro_batch):
                for place, part in pieces:
                    pixels = images[batch][part].detach().requires_grad_()
                    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused ones have no second derivative
                        losses = F.cross_entropy(self._forward(leaves, pixels), labels[batch][part], reduction="none")
                        loss = (losses * weights[batch][part]).sum()
                        found = torch.autograd.grad(
                            loss, list(matched.values()), create_graph=True, materialize_grads=True
                        )
                    for name, own in zip(matched, found, strict=True):
                        stacks[name][place].add_(own.detach())
                    passes.append((place, pixels, found))
            v = towards(stacks)
            parts = []
            for place, pixels, found in passes:
                with torch.enable_grad():
                    products = [(own * v[name][place]).sum() for name, own in zip(matched, found, strict=True)]
                    inner = torch.stack(products).sum()
                parts.append(torch.autograd.grad(inner, pixels, materialize_grads=True)[0])
            return torch.cat(parts)

        return gradient

    def warm_up(self) -> None:
        """Nothing has to be done before the first step."""

    def _forward(self, params: Params, images: Tensor) -> Tensor:
        with self._precision():
            logits = self.model.forward(params, images)
        return logits.to(images.dtype)

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self.half is None else torch.autocast(self.device.type, self.half)
