"""QuickDrop: train and distil, unlearn, recover, relearn (Algorithm 2 and §3.4).

Dhasade, Ding, Guo, Kermarrec, de Vos, Wu. QuickDrop: efficient federated unlearning via synthetic data
generation. Middleware 2024.

Departures from the paper: ascent stops at ``max_loss`` (see :mod:`local_sgd`). An option, not the default:
relearning can mix S_f with the rest of S (``relearn.data = "mixed"``), because S_f alone soon teaches the model
that everything is the forgotten class.
Departures from the official code: its departures from the paper are not followed. There the model trains
on the synthetic images, these begin anew in every round, one client alone unlearns, and a mirrored descent
stands for ascent.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qdsim.algorithms import fedavg, local_sgd
from qdsim.algorithms.distillation import (
    FINETUNE_LR,
    FINETUNE_STEPS,
    MatchedImages,
    class_means,
    finetune,
    match,
    matched_images,
    on_device,
    per_class,
    with_pixels,
)
from qdsim.algorithms.history import History
from qdsim.algorithms.local_sgd import batches, cross_entropy, make_update
from qdsim.algorithms.phase import ClientUpdate, Phase, RoundContext, Updates
from qdsim.algorithms.settings import Distillation, Hyperparameters, Stage
from qdsim.algorithms.stopping import RECOVERED, RELEARNED, TRAINED
from qdsim.clocks import Stopwatch
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.gradients import is_matched
from qdsim.models.params import Params


def train(
    client: ClientState,
    params: Params,
    *,
    stage: Stage,
    distillation: Distillation,
    ctx: RoundContext,
    compute: Compute,
) -> tuple[ClientState, ClientUpdate]:
    """One client's T local steps (Algorithm 2, lines 10-17): the real gradient serves twice.

    Matching reads θ and the real gradients and writes synthetic pixels alone, so the model's trajectory is
    that of FedAvg whatever the synthetic settings are.
    """
    synthetic = client.synthetic
    assert synthetic is not None
    samples = client.samples(View("real"))
    theta = P.to(P.clone(params), compute.device)
    anchor = P.clone(theta) if stage.proximal else {}
    dtype = next(iter(theta.values())).dtype
    pixels, velocity = on_device(synthetic, compute.device, dtype)
    real_draws = ctx.generator("batches", client.client_id)
    synthetic_draws = ctx.generator("synthetic-batches", client.client_id)
    watch = Stopwatch(compute.device)
    # line 12, of all steps: sample B^D, class by class so that its gradient falls apart into those of its classes
    every = compute.model.num_classes if compute.gradients.all_classes else 0
    drawn, drawn_synthetic, counts = [], [], []
    for chosen in batches(len(samples), stage.batch_size, stage.steps, real_draws):
        drawn.append(chosen[np.argsort(client.labels[chosen], kind="stable")])
        classes, sizes = np.unique(client.labels[chosen], return_counts=True)
        among = np.arange(every) if every else classes
        rows = synthetic_rows(synthetic.labels, among, distillation.batch, synthetic_draws)
        drawn_synthetic.append((classes, sizes, rows))
        counts.append((per_class(classes, sizes, every) if every else sizes).tolist())
    set_size = len(pixels) if compute.device.type == "cuda" else 0
    matched = matched_images(drawn_synthetic, compute.device, set_size, every)

    names = [name for name, tensor in theta.items() if is_matched(tensor)]

    def real_gradients(images: Tensor, labels: Tensor, *, counts: list[int]) -> tuple[Tensor, Params, Params]:
        return compute.gradients.of_classes(theta, images, labels, counts, cross_entropy)

    def learn(*tensors: Tensor, counts: list[int]) -> None:
        own = MatchedImages(counts, *tensors[: -len(names)])
        real = class_means(dict(zip(names, tensors[-len(names) :], strict=True)), own)
        match(compute, theta, pixels, velocity, own, real, distillation)

    # images that do not share one pass are grouped by what was drawn of them
    alike = min(len(pixels), distillation.batch) <= compute.micro_batch or len(pixels) <= distillation.batch
    find = compute.replayed(real_gradients, stage.steps)
    change = compute.replayed(learn, stage.steps if alike else 0)
    losses: list[Tensor] = []
    given = samples.batches(drawn, compute.device, dtype)
    for (images, labels), sizes, own in zip(given, counts, matched, strict=True):
        # line 13: compute ∇L^{D_i} on B^D, kept per class
        loss, gradient, by_class = find(images, labels, counts=sizes)
        # lines 14 and 15: compute ∇L^{S_i} on B^S and update it
        with watch:
            change(*own.tensors(), *by_class.values(), counts=own.counts)
        # line 17: θ ← θ - η ∇L^{D_i}(θ), with the gradient of line 13
        if stage.proximal:
            P.pull_(theta, anchor, stage.lr * stage.proximal)
        P.step_(theta, gradient, -stage.lr / len(labels))
        losses.append(loss / len(labels))
    processed = sum(len(chosen) for chosen in drawn)
    update = make_update(client.client_id, len(samples), params, theta, losses, processed, watch)
    return replace(client, synthetic=with_pixels(synthetic, pixels, velocity)), update


def synthetic_rows(
    labels: np.ndarray, classes: np.ndarray, most: int, generator: torch.Generator
) -> dict[int, np.ndarray]:
    """B^S: at most ``most`` synthetic images of the client, those of the given classes, by class."""
    rows = np.arange(len(labels))
    if len(labels) > most:
        rows = np.sort(torch.randperm(len(labels), generator=generator)[:most].numpy())
    found = {int(c): rows[labels[rows] == c] for c in classes}
    return {c: chosen for c, chosen in found.items() if len(chosen)}


def training(hyper: Hyperparameters) -> list[Phase]:
    """Steps 1 and 2 of the workflow: train and distil; fine-tune where F > 0, one fresh network a round."""
    view = View("real")
    distillation = hyper.synthetic
    found = [fedavg.phase("train", hyper.train, view, TRAINED, hyper.server)]
    if distillation.matching:
        learn = partial(train, stage=hyper.train, distillation=distillation)
        found = [replace(found[0], client_step=learn, learns=True)]
    if distillation.finetune:
        batch_size = hyper.train.batch_size
        stage = Stage(distillation.finetune, FINETUNE_STEPS, batch_size, FINETUNE_LR, participation=1.0)
        refine = partial(finetune, distillation=distillation, batch_size=batch_size)
        found.append(replace(fedavg.phase("finetune", stage, view), client_step=refine, server_step=_keep, learns=True))
    return found


def phases(hyper: Hyperparameters, settings: None, request: UnlearningRequest, history: History) -> list[Phase]:
    """Steps 3 to 5 of the workflow for one request."""
    forget = View("synthetic", only=request.forget, without=request.previously_forgotten)
    retain = View("augmented" if hyper.recover.augment else "synthetic", without=request.forgotten)
    ascend = partial(local_sgd.run, stage=hyper.unlearn, view=forget, ascend=True, max_loss=hyper.max_loss)
    relearned = View("synthetic", without=request.previously_forgotten) if hyper.relearn.data == "mixed" else forget
    return [
        replace(fedavg.phase("unlearn", hyper.unlearn, forget, fedavg.forgot(request)), client_step=ascend),
        fedavg.phase("recover", hyper.recover, retain, RECOVERED, hyper.server),
        fedavg.phase("relearn", hyper.relearn, relearned, RELEARNED, hyper.server),
    ]


def _keep(params: Params, updates: Updates, ctx: RoundContext) -> Params:
    """Fine-tuning leaves the model alone; waiting for every client is all the server does."""
    for _ in updates:
        pass
    return params
