"""Synthetic sets by gradient matching (§3.2, equations 5 and 6; §3.3 for augmentation and fine-tuning).

Zhao, Mopuri, Bilen. Dataset condensation with gradient matching. ICLR 2021.

Departures from the paper: only the classes that occur in B^D are matched in a step, since the others have
no real gradient to match. Fine-tuning draws its real batches class by class, as Zhao et al. do.
Departures from the official code: the synthetic set persists over rounds (theirs begins anew in every
round), and no weight decay acts on pixels.
Kept from it: gradients of one-dimensional parameters (biases, γ, β) do not enter the distance; SGD with
momentum 0.5 on the pixels; pixels are not clamped.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim import params as P
from qdsim.algorithms.local_sgd import batches, make_update, summed_gradient
from qdsim.clients import ClientState, SyntheticSet
from qdsim.clocks import Stopwatch
from qdsim.errors import Diverged
from qdsim.hyper import Distillation
from qdsim.params import Params
from qdsim.phases import Assignment, ClientUpdate, Compute

DISTANCE_EPS = 1e-6
FINETUNE_STEPS = 50
"""Inner matching steps on each fresh network (§4.1)."""
FINETUNE_EPOCHS = 10
"""Passes over S_i that train the fresh network between two of them: Zhao et al.'s choice for 50 steps."""
FINETUNE_LR = 0.01


def initial_set(
    client: ClientState, distillation: Distillation, pick: torch.Generator, dtype: torch.dtype = torch.float32
) -> SyntheticSet:
    """S_i^c ← ceil(|D_i^c| / s) samples of D_i^c (Algorithm 2, lines 2-7), and as many beside them (§3.3.1).

    Those beside them are other samples as long as the class has enough.
    """
    origin, extra = [], []
    for c in np.unique(client.labels):
        positions = np.flatnonzero(client.labels == c)
        count = -(-len(positions) // distillation.scale)
        order = positions[torch.randperm(len(positions), generator=pick).numpy()]
        origin.append(order[:count])
        extra.append(order[np.arange(count, 2 * count) % len(order)])
    rows = np.concatenate(origin)
    images = client.normalized(rows, torch.device("cpu"), dtype)
    if distillation.init == "noise":
        images = torch.randn(images.shape, generator=pick, dtype=dtype)
    return SyntheticSet(images, client.labels[rows], torch.zeros_like(images), rows, np.concatenate(extra))


def distance(synthetic: list[Tensor], real: list[Tensor]) -> Tensor:
    """d(·,·): the sum over tensors and their output rows of 1 - cos; one-dimensional tensors count 0."""
    total = torch.zeros((), dtype=real[0].dtype, device=real[0].device)
    for a, b in zip(synthetic, real, strict=True):
        if a.ndim < 2:
            continue
        a, b = a.flatten(1), b.flatten(1)
        norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
        total = total + (1 - (a * b).sum(1) / (norms + DISTANCE_EPS)).sum()
    return total


def pixel_gradient(compute: Compute, params: Params, images: Tensor, label: int, real: Params) -> Tensor:
    """∇_S d(∇_θ L^{S^c}(θ), ∇_θ L^{D^c}(θ)) for the images of one class; θ is left alone."""
    matched = [name for name, tensor in params.items() if tensor.ndim >= 2]
    leaves = {name: tensor.detach().requires_grad_(name in matched) for name, tensor in params.items()}
    pixels = images.detach().requires_grad_()
    labels = torch.full((len(images),), label, device=images.device)
    loss = F.cross_entropy(compute.model.forward(leaves, pixels), labels)
    gradient = torch.autograd.grad(loss, [leaves[name] for name in matched], create_graph=True)
    d = distance(list(gradient), [real[name] for name in matched])
    return torch.autograd.grad(d, pixels)[0]


def match(
    compute: Compute,
    params: Params,
    pixels: Tensor,
    velocity: Tensor,
    rows_of_class: dict[int, Tensor],
    real: dict[int, Params],
    distillation: Distillation,
) -> None:
    """S_i ← opt-alg(d, ς_S, η_S), class by class (equation 6). In place on ``pixels`` and ``velocity``.

    ``rows_of_class`` are the rows of B^S by class; ``real`` holds each class's mean gradient on B^D.
    """
    for _ in range(distillation.steps):
        for c, rows in rows_of_class.items():
            gradient = pixel_gradient(compute, params, pixels[rows], c, real[c])
            velocity[rows] = distillation.momentum * velocity[rows] + gradient
            pixels[rows] -= distillation.lr * velocity[rows]


def mean_gradient(summed: Params, count: int) -> Params:
    """Divide a summed gradient by its samples, where the distance looks at all."""
    return {name: tensor / count for name, tensor in summed.items() if tensor.ndim >= 2}


def learnt(synthetic: SyntheticSet, pixels: Tensor, velocity: Tensor) -> SyntheticSet:
    """Return the set with its new pixels; refuse pixels that are no longer numbers."""
    if not bool(torch.isfinite(pixels).all()):
        raise Diverged("synthetic pixels are no longer finite: lower synthetic.lr")
    return replace(synthetic, images=pixels.cpu(), velocity=velocity.cpu())


def finetune(
    client: ClientState,
    params: Params,
    *,
    distillation: Distillation,
    batch_size: int,
    names: Assignment,
    compute: Compute,
) -> tuple[ClientState, ClientUpdate]:
    """Refine S_i on one fresh network (§3.3.2): match, train the network on S_i, 50 times over.

    The federation's model is neither used nor changed, so the update carries no delta.
    """
    synthetic = client.synthetic
    assert synthetic is not None
    watch = Stopwatch(compute.device)
    dtype = synthetic.images.dtype
    pixels = synthetic.images.to(compute.device, copy=True)
    velocity = synthetic.velocity.to(compute.device, copy=True)
    labels = torch.from_numpy(synthetic.labels).to(compute.device)
    theta = P.to(compute.model.init(names.generator("finetune-init", client.client_id), dtype), compute.device)
    draws = names.generator("batches", client.client_id)
    losses: list[Tensor] = []
    processed = 0
    for step in range(FINETUNE_STEPS):
        real: dict[int, Params] = {}
        rows_of_class: dict[int, Tensor] = {}
        loss = torch.zeros((), dtype=dtype, device=compute.device)
        for c in np.unique(client.labels):
            positions = np.flatnonzero(client.labels == c)
            chosen = positions[torch.randperm(len(positions), generator=draws)[:batch_size].numpy()]
            images = client.normalized(chosen, compute.device, dtype)
            targets = torch.full((len(chosen),), int(c), device=compute.device)
            loss_sum, gradient = summed_gradient(compute, theta, images, targets)
            real[int(c)] = mean_gradient(gradient, len(chosen))
            rows_of_class[int(c)] = torch.nonzero(labels == int(c)).flatten()
            loss += loss_sum / len(chosen)
            processed += len(chosen)
        with watch:
            match(compute, theta, pixels, velocity, rows_of_class, real, distillation)
        losses.append(loss / len(real))
        if step == FINETUNE_STEPS - 1:
            break
        for _ in range(FINETUNE_EPOCHS):
            per_epoch = -(-len(labels) // batch_size)
            for chosen in batches(len(labels), batch_size, per_epoch, draws):
                rows = torch.from_numpy(chosen)
                _, gradient = summed_gradient(compute, theta, pixels[rows], labels[rows])
                P.step_(theta, gradient, -FINETUNE_LR / len(rows))
    update = make_update(client.client_id, len(client.labels), {}, {}, losses, processed, watch)
    return replace(client, synthetic=learnt(synthetic, pixels, velocity)), update
