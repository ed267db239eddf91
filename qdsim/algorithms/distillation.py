"""Synthetic sets by gradient matching (§3.2, equations 5 and 6; §3.3 for augmentation and fine-tuning).

Zhao, Mopuri, Bilen. Dataset condensation with gradient matching. ICLR 2021.

Departures from the paper: only the classes that occur in B^D are matched in a step, since the others have
no real gradient to match. Fine-tuning draws its real batches class by class, as Zhao et al. do.
Departures from the official code: the synthetic set persists over rounds (theirs begins anew in every
round), and no weight decay acts on pixels.
Kept from it: gradients of one-dimensional parameters (biases, γ, β) do not enter the distance; SGD with
momentum 0.5 on the pixels; pixels are not clamped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qdsim.algorithms.local_sgd import batches, cross_entropy, make_update, summed_gradient
from qdsim.algorithms.phase import ClientUpdate, RoundContext
from qdsim.algorithms.settings import Distillation
from qdsim.clocks import Stopwatch
from qdsim.data.clients import ClientState, SyntheticSet
from qdsim.data.forgetting import View
from qdsim.errors import Diverged
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.gradients import is_matched
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


@dataclass(frozen=True)
class MatchedImages:
    """B^S of one step, sorted by class, and where the real gradients of these classes are; on the device."""

    counts: list[int]
    """Images of each class that is matched; of all classes, those without any among them, on a GPU that wants so."""
    rows: Tensor
    """Where they are in the synthetic set."""
    labels: Tensor
    places: Tensor
    """Places of their classes in the stack of real gradients."""
    sizes: Tensor
    """Samples that each of these gradients is a sum over, 1 at the least."""
    place_of_row: Tensor
    """On a GPU, of each image of the synthetic set: its place in B^S, -1 where this step does not change it."""

    def tensors(self) -> list[Tensor]:
        """Return what differs from step to step."""
        return [self.rows, self.labels, self.places, self.sizes, self.place_of_row]


def matched_images(
    steps: Sequence[tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]],
    device: torch.device,
    images: int = 0,
    all_classes: int = 0,
) -> list[MatchedImages]:
    """Say for each step what is matched, from the batch's classes and their samples, and the rows of B^S by class.

    What all steps need on the device goes there in one copy. ``images``: how many the synthetic set has. With
    ``all_classes``, their number, those that the batch does not have are there as well, with images that do not change.
    """
    counts, parts = [], []
    for classes, sizes, rows_of_class in steps:
        rows = np.concatenate([np.empty(0, np.int64), *rows_of_class.values()])
        labels = np.repeat(np.array(list(rows_of_class), np.int64), [len(own) for own in rows_of_class.values()])
        if all_classes:
            places = np.arange(all_classes)
            counts.append(np.bincount(labels, minlength=all_classes).tolist())
            sizes = np.maximum(1, per_class(classes, sizes, all_classes))
        else:
            places = np.flatnonzero(np.isin(classes, list(rows_of_class)))
            counts.append([len(own) for own in rows_of_class.values()])
            sizes = sizes[places]
        place_of_row = np.full(images, -1)
        if images:
            place_of_row[rows] = np.where(np.isin(labels, classes), np.arange(len(rows)), -1)
        parts += [torch.from_numpy(array) for array in (rows, labels, places, sizes, place_of_row)]
    parts = P.move(parts, device)
    return [MatchedImages(own, *parts[5 * step : 5 * step + 5]) for step, own in enumerate(counts)]


def per_class(classes: np.ndarray, sizes: np.ndarray, all_classes: int) -> np.ndarray:
    """Return sizes of some classes as those of all."""
    found = np.zeros(all_classes, np.int64)
    found[classes] = sizes
    return found


def match(
    compute: Compute,
    params: Params,
    pixels: Tensor,
    velocity: Tensor,
    matched: MatchedImages,
    real: Params,
    distillation: Distillation,
) -> None:
    """S_i ← opt-alg(d, ς_S, η_S), class by class (equation 6). In place on ``pixels`` and ``velocity``.

    ``real`` holds each matched class's mean gradient on B^D, stacked. Classes that together have no more images than a
    micro-batch share their passes. A class that B^D does not have has no real gradient, so v is zero there.
    """
    pixel_gradient = compute.gradients.of_pixels(params)
    every = compute.gradients.all_classes
    ends = np.cumsum([0, *matched.counts]).tolist()
    for group in group_by_size(matched.counts, compute.micro_batch):
        if ends[group.start] == ends[group.stop]:  # none of these classes has an image
            continue
        chosen = slice(ends[group.start], ends[group.stop])
        rows, labels = matched.rows[chosen], matched.labels[chosen]
        counts, targets = matched.counts, real
        if not every:
            counts = counts[group.start : group.stop]
            targets = {name: stack[group.start : group.stop] for name, stack in real.items()}
        for _ in range(distillation.steps):
            gradient = pixel_gradient(pixels.index_select(0, rows), labels, counts, partial(towards, real=targets))
            if compute.device.type == "cpu":
                velocity[rows] = distillation.momentum * velocity[rows] + gradient
                pixels[rows] -= distillation.lr * velocity[rows]
            else:
                place = matched.place_of_row - chosen.start if chosen.start else matched.place_of_row
                _step_where(pixels, velocity, gradient, place, distillation)


def _step_where(pixels: Tensor, velocity: Tensor, gradient: Tensor, place: Tensor, distillation: Distillation) -> None:
    """In place, as at rows, but on the whole set: a GPU that is to repeat itself would sort the rows, and ask for them.

    ``place``: of each image, in ``gradient``; those that are not in it stay as they are.
    """
    found = gradient.index_select(0, place.clamp(0, len(gradient) - 1))
    changes = ((place >= 0) & (place < len(gradient)))[:, None, None, None]
    velocity.copy_(torch.where(changes, distillation.momentum * velocity + found, velocity))
    pixels.copy_(torch.where(changes, pixels - distillation.lr * velocity, pixels))


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


def class_means(by_class: Params, matched: MatchedImages) -> Params:
    """Divide each class's summed gradient by its samples, for the classes that are matched."""
    found = {}
    for name, stack in by_class.items():
        own = stack if len(matched.counts) == len(stack) else stack.index_select(0, matched.places)
        found[name] = own / matched.sizes.to(stack.dtype).view(-1, *[1] * (stack.ndim - 1))
    return found


def with_pixels(synthetic: SyntheticSet, pixels: Tensor, velocity: Tensor) -> SyntheticSet:
    """Return the set with its new pixels; refuse pixels that are no longer numbers, or no longer those of an image."""
    pixels, velocity = P.move([pixels, velocity], torch.device("cpu"))
    largest = float(pixels.abs().max()) if pixels.numel() else 0.0
    if not largest <= LARGEST_PIXEL:  # not a number either
        raise Diverged(f"a synthetic pixel has become {largest:.3g}: lower synthetic.lr")
    return replace(synthetic, images=pixels, velocity=velocity)


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
    pixels, velocity = on_device(synthetic, compute.device, dtype)
    theta = P.to(compute.model.init(ctx.generator("finetune-init", client.client_id), dtype), compute.device)
    draws = ctx.generator("batches", client.client_id)
    classes = np.unique(client.labels)
    own = {int(c): np.flatnonzero(client.labels == c) for c in classes}
    sizes = np.array([min(batch_size, len(positions)) for positions in own.values()])
    real_drawn, mixed_drawn = finetune_draws(list(own.values()), len(synthetic.labels), batch_size, draws)
    mixed = P.move([torch.from_numpy(array) for array in [synthetic.labels, *mixed_drawn]], compute.device)
    labels, passes = mixed[0], iter(mixed[1:])
    rows_of_class = {int(c): np.flatnonzero(synthetic.labels == c) for c in classes}
    every = compute.model.num_classes if compute.gradients.all_classes else 0
    set_size = len(pixels) if compute.device.type == "cuda" else 0
    (matched,) = matched_images([(classes, sizes, rows_of_class)], compute.device, set_size, every)
    counts = (per_class(classes, sizes, every) if every else sizes).tolist()
    passes_between = len(mixed_drawn) // (FINETUNE_STEPS - 1)

    def real_gradients(images: Tensor, targets: Tensor) -> tuple[Tensor, Params, Params]:
        return compute.gradients.of_classes(theta, images, targets, counts, cross_entropy)

    def learn(*stacks: Tensor) -> None:
        real = class_means(dict(zip(names, stacks, strict=True)), matched)
        match(compute, theta, pixels, velocity, matched, real, distillation)

    def own_gradient(rows: Tensor) -> tuple[Tensor, Params]:
        return summed_gradient(compute, theta, pixels.index_select(0, rows), labels.index_select(0, rows))

    names = [name for name, tensor in theta.items() if is_matched(tensor)]
    find, change = compute.replayed(real_gradients, FINETUNE_STEPS), compute.replayed(learn, FINETUNE_STEPS)
    find_own = compute.replayed(own_gradient, len(mixed_drawn))
    losses: list[Tensor] = []
    processed = 0
    samples = client.samples(View("real"))
    for step, (images, targets) in enumerate(samples.batches(real_drawn, compute.device, dtype)):
        loss, _, by_class = find(images, targets)
        with watch:
            change(*by_class.values())
        processed += len(targets)
        losses.append(loss / len(targets))
        if step == FINETUNE_STEPS - 1:
            break
        for _ in range(passes_between):
            rows = next(passes)
            _, gradient = find_own(rows)
            P.step_(theta, gradient, -FINETUNE_LR / len(rows))
    pixels, velocity, *losses = P.move([pixels, velocity, *losses], torch.device("cpu"))
    update = make_update(client.client_id, len(client.labels), {}, {}, losses, processed, watch)
    return replace(client, synthetic=with_pixels(synthetic, pixels, velocity)), update


def finetune_draws(
    own: Sequence[np.ndarray], synthetic: int, batch_size: int, draws: torch.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draw all of fine-tuning: a batch of each class's positions for every step; between them, batches of S_i."""
    real: list[np.ndarray] = []
    mixed: list[np.ndarray] = []
    for step in range(FINETUNE_STEPS):
        real.append(np.concatenate([p[torch.randperm(len(p), generator=draws)[:batch_size].numpy()] for p in own]))
        if step < FINETUNE_STEPS - 1:
            for _ in range(FINETUNE_EPOCHS):
                mixed.extend(batches(synthetic, batch_size, -(-synthetic // batch_size), draws))
    return real, mixed


def on_device(synthetic: SyntheticSet, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a copy of pixels and velocity where a step works on them."""
    pixels, velocity = P.move([t.to(dtype, copy=True) for t in (synthetic.images, synthetic.velocity)], device)
    return pixels, velocity
