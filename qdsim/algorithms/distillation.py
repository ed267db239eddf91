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
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qdsim.algorithms.local_sgd import batches, cross_entropy, make_update, summed_gradient
from qdsim.algorithms.phase import ClientUpdate, RoundContext
from qdsim.algorithms.settings import Distillation
from qdsim.clocks import Stopwatch
from qdsim.data.clients import ClientState, SyntheticSet
from qdsim.errors import Diverged
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.params import Params

DISTANCE_EPS = 1e-6
LARGEST_PIXEL = 1e6
"""Real pixels are a few standard deviations; normalisation in the network hides how far others have gone."""
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


def distance_gradient(synthetic: Tensor, real: Tensor) -> Tensor:
    """∂d/∂g for the gradients g of the synthetic set and g' of the real data, both (classes, rows, ...).

    d(g, g') is the sum over tensors and their output rows of 1 - cos = 1 - <g, g'> / (|g| |g'| + ε); one-dimensional
    tensors count 0. A row without length has no direction to turn: its derivative is that of <g, g'> alone.
    """
    a, b = synthetic.flatten(2), real.flatten(2)
    length, other = (torch.linalg.vector_norm(t, dim=2, keepdim=True) for t in (a, b))
    below = length * other + DISTANCE_EPS
    turn = (a * b).sum(2, keepdim=True) * other / (below * below * length)
    found: Tensor = a * torch.where(length > 0, turn, 0) - b / below
    return found.view_as(synthetic)


def towards(synthetic: Params, real: Params) -> Params:
    """v = ∂d/∂(∇_θ L^S), tensor by tensor: where matching would have the synthetic gradients go."""
    return {name: distance_gradient(stack, real[name]) for name, stack in synthetic.items()}


def match(
    compute: Compute,
    params: Params,
    pixels: Tensor,
    velocity: Tensor,
    rows_of_class: dict[int, np.ndarray],
    real: Params,
    distillation: Distillation,
) -> None:
    """S_i ← opt-alg(d, ς_S, η_S), class by class (equation 6). In place on ``pixels`` and ``velocity``.

    ``rows_of_class`` are the rows of B^S by class; ``real`` holds each class's mean gradient on B^D, stacked in
    the same order. Classes that together have no more images than a micro-batch share their passes.
    """
    classes = list(rows_of_class)
    pixel_gradient = compute.gradients.of_pixels(params)
    for places in group_by_size([len(rows) for rows in rows_of_class.values()], compute.micro_batch):
        counts = {classes[place]: len(rows_of_class[classes[place]]) for place in places}
        rows = torch.from_numpy(np.concatenate([rows_of_class[c] for c in counts])).to(pixels.device)
        targets = {name: stack[places.start : places.stop] for name, stack in real.items()}
        for _ in range(distillation.steps):
            gradient = pixel_gradient(pixels[rows], counts, partial(towards, real=targets))
            velocity[rows] = distillation.momentum * velocity[rows] + gradient
            pixels[rows] -= distillation.lr * velocity[rows]


def group_by_size(sizes: list[int], most: int) -> list[range]:
    """Group neighbours so that a group has at most ``most`` in all, or is one alone."""
    groups: list[range] = []
    held = 0
    for place, size in enumerate(sizes):
        if groups and held + size <= most:
            groups[-1] = range(groups[-1].start, place + 1)
            held += size
        else:
            groups.append(range(place, place + 1))
            held = size
    return groups


def class_means(
    by_class: Params, classes: np.ndarray, counts: np.ndarray, rows_of_class: dict[int, np.ndarray]
) -> Params:
    """Divide each class's summed gradient by its samples, for the classes that are matched."""
    places = [place for place, c in enumerate(classes) if int(c) in rows_of_class]
    found = {}
    for name, stack in by_class.items():
        sizes = torch.from_numpy(counts[places]).to(stack).view(-1, *[1] * (stack.ndim - 1))
        found[name] = (stack if len(places) == len(stack) else stack[places]) / sizes
    return found


def with_pixels(synthetic: SyntheticSet, pixels: Tensor, velocity: Tensor) -> SyntheticSet:
    """Return the set with its new pixels; refuse pixels that are no longer numbers, or no longer those of an image."""
    largest = float(pixels.abs().max()) if pixels.numel() else 0.0
    if not largest <= LARGEST_PIXEL:  # not a number either
        raise Diverged(f"a synthetic pixel has become {largest:.3g}: lower synthetic.lr")
    return replace(synthetic, images=pixels.cpu(), velocity=velocity.cpu())


def finetune(
    client: ClientState,
    params: Params,
    *,
    distillation: Distillation,
    batch_size: int,
    ctx: RoundContext,
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
    theta = P.to(compute.model.init(ctx.generator("finetune-init", client.client_id), dtype), compute.device)
    draws = ctx.generator("batches", client.client_id)
    classes = np.unique(client.labels)
    own = {int(c): np.flatnonzero(client.labels == c) for c in classes}
    rows_of_class = {int(c): np.flatnonzero(synthetic.labels == c) for c in classes}
    losses: list[Tensor] = []
    processed = 0
    for step in range(FINETUNE_STEPS):
        chosen = [p[torch.randperm(len(p), generator=draws)[:batch_size].numpy()] for p in own.values()]
        counts = np.array([len(positions) for positions in chosen])
        images = client.normalized(np.concatenate(chosen), compute.device, dtype)
        targets = torch.from_numpy(np.repeat(classes, counts)).to(compute.device)
        loss, _, by_class = compute.gradients.of_classes(theta, images, targets, counts.tolist(), cross_entropy)
        with watch:
            real = class_means(by_class, classes, counts, rows_of_class)
            match(compute, theta, pixels, velocity, rows_of_class, real, distillation)
        processed += len(targets)
        losses.append(loss / len(targets))
        if step == FINETUNE_STEPS - 1:
            break
        for _ in range(FINETUNE_EPOCHS):
            per_epoch = -(-len(labels) // batch_size)
            for mixed in batches(len(labels), batch_size, per_epoch, draws):
                rows = torch.from_numpy(mixed)
                _, gradient = summed_gradient(compute, theta, pixels[rows], labels[rows])
                P.step_(theta, gradient, -FINETUNE_LR / len(rows))
    update = make_update(client.client_id, len(client.labels), {}, {}, losses, processed, watch)
    return replace(client, synthetic=with_pixels(synthetic, pixels, velocity)), update
