"""What ``qdsim.models`` differentiates, left to autograd: the definitions, slow and plain."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.algorithms.distillation import DISTANCE_EPS, MatchedImages, matched_images, towards
from qdsim.algorithms.local_sgd import cross_entropy
from qdsim.models.compute import Compute
from qdsim.models.model import Model
from qdsim.models.params import Params


def gradient(model: Model, params: Params, images: Tensor, labels: Tensor) -> tuple[Tensor, Params]:
    """The sum over samples of cross-entropy, and its gradient."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    loss = F.cross_entropy(model.forward(leaves, images), labels, reduction="sum")
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def distance(synthetic: list[Tensor], real: list[Tensor]) -> Tensor:
    """d(·,·) of equation 5: the sum over tensors and their output rows of 1 - cos; one-dimensional tensors count 0."""
    total = torch.zeros((), dtype=real[0].dtype)
    for a, b in zip(synthetic, real, strict=True):
        if a.ndim < 2:
            continue
        a, b = a.flatten(1), b.flatten(1)
        norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
        total = total + (1 - (a * b).sum(1) / (norms + DISTANCE_EPS)).sum()
    return total


def pixel_gradient(model: Model, params: Params, images: Tensor, label: int, real: Params) -> Tensor:
    """The gradient of d with respect to the images of one class, by a double backward."""
    matched = [name for name, tensor in params.items() if tensor.ndim >= 2]
    leaves = {name: tensor.detach().requires_grad_(name in matched) for name, tensor in params.items()}
    pixels = images.detach().requires_grad_()
    labels = torch.full((len(images),), label)
    loss = F.cross_entropy(model.forward(leaves, pixels), labels)
    found = torch.autograd.grad(loss, [leaves[name] for name in matched], create_graph=True)
    return torch.autograd.grad(distance(list(found), [real[name] for name in matched]), pixels)[0]


def class_gradients(
    compute: Compute, params: Params, images: Tensor, labels: Tensor, counts: list[int]
) -> tuple[Tensor, Params, Params]:
    """Loss, gradient and gradients by class of a batch that is sorted by class, as the simulator finds them."""
    return compute.gradients.of_classes(params, images, labels, counts, cross_entropy)


def pixel_gradients(compute: Compute, params: Params, images: Tensor, counts: dict[int, int], real: Params) -> Tensor:
    """∇_S d for all classes of a batch, with the real gradients stacked, as the simulator finds it."""
    labels = torch.tensor([c for c, count in counts.items() for _ in range(count)])
    return compute.gradients.of_pixels(params)(images, labels, list(counts.values()), partial(towards, real=real))


def matched(rows_of_class: dict[int, np.ndarray]) -> MatchedImages:
    """Images that are all matched with the means of their classes."""
    classes = np.array(list(rows_of_class))
    (found,) = matched_images([(classes, np.ones_like(classes), rows_of_class)], torch.device("cpu"))
    return found
