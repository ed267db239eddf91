"""FU-MP: prune the channels that tell the class apart, then fine-tune on the rest.

Wang, Guo, Xie, Qi. Federated unlearning via class-discriminative pruning. WWW 2022.

Order: clients send each channel's mean activation per class; the server scores channels by TF-IDF for the class, prunes
the top R of all of them at once, and FedAvg on what is left recovers the rest.

Departures from FU-MP's paper: (1) class means are weighted by the clients' counts; an absent class would otherwise
enter as zeros. (2) Activity is read after normalisation and ReLU, which is what the next layer sees; instance
normalisation undoes scale and mean of the convolution's own output (``hook = "convolution"`` reads that). (3) At least
one channel of a layer stays. (4) Statistics come from all local images, not one batch.
Departures from the authors' code: it keeps the channels with the *highest* scores and removes the least discriminative
(``side = "bottom"`` does that); here the highest go, as the paper says. There a pruned channel can grow back in
fine-tuning; here it is held at zero after every step of a client and of the server. A zeroed filter alone would
not silence its channel: instance normalisation turns it into β, so γ and β are pruned as well. Which tensors those are
is the network's to say (``Model.prunable``).
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qdsim.algorithms import fedavg, local_sgd
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import Fump
from qdsim.algorithms.phase import ClientUpdate, Phase, RoundContext, Updates
from qdsim.algorithms.settings import Hyperparameters, Stage
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.model import Model, PrunableLayer
from qdsim.models.params import Params

COUNTS = "counts"
Layers = tuple[PrunableLayer, ...]


def statistics(
    client: ClientState,
    params: Params,
    *,
    batch_size: int,
    view: View,
    hook: str,
    ctx: RoundContext,
    compute: Compute,
) -> tuple[ClientState, ClientUpdate]:
    """A_i: the sum over the client's images of each channel's activity, by class, beside the counts of classes."""
    samples = client.samples(view)
    theta = P.to(params, compute.device)
    dtype = next(iter(theta.values())).dtype
    widths = [len(theta[layer.tensors[0]]) for layer in compute.model.prunable]
    sums = [torch.zeros(compute.model.num_classes, width, dtype=torch.float64) for width in widths]
    counts = torch.zeros(compute.model.num_classes, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    piece = min(batch_size, compute.micro_batch)
    pieces = [np.arange(start, min(start + piece, len(samples))) for start in range(0, len(samples), piece)]
    seen: list[list[Tensor]] = []
    """Of each piece labels, loss and activities, where they were computed."""

    def add_up() -> None:
        """Sums are made on the CPU, in the order of the samples."""
        home = iter(P.move([tensor for found in seen for tensor in found], torch.device("cpu")))
        for _ in seen:
            here = next(home)
            loss.add_(next(home))
            counts.index_add_(0, here, torch.ones(len(here), dtype=torch.float64))
            for total in sums:
                total.index_add_(0, here, next(home).to(torch.float64))
        seen.clear()

    with torch.no_grad():
        for images, labels in samples.batches(pieces, compute.device, dtype):
            logits, activity = compute.model.activity(theta, images, hook)
            seen.append([labels, local_sgd.cross_entropy(logits, labels), *activity])
            if compute.device.type == "cpu":
                add_up()
    add_up()
    sent = {f"activity{block}": total for block, total in enumerate(sums)} | {COUNTS: counts}
    return client, ClientUpdate(
        client_id=client.client_id,
        num_samples=len(samples),
        delta=sent,
        loss=float(loss) / len(samples),
        gradients=0,
        samples=len(samples),
    )


def scores(activity: Tensor, present: Tensor, target: int) -> Tensor:
    """TF-IDF of each channel of a layer for a class, from the classes' mean activities (classes, channels).

    TF is the channel's share of the layer's activity on the class; IDF = log((1 + C) / (1 + the classes on which
    the channel is at least as active as on average)), over the C classes that occur.
    """
    share = activity[target] / activity[target].sum().clamp_min(torch.finfo(activity.dtype).tiny)
    seen = activity[present]
    spread = (seen >= seen.mean(0)).sum(0)
    return share * torch.log((1 + len(seen)) / (1 + spread.to(activity.dtype)))


def prune(
    params: Params, updates: Updates, ctx: RoundContext, *, layers: Layers, settings: Fump, target: int
) -> Params:
    """Score every channel of every layer and zero the share R of them with the highest scores."""
    total: Params = {}
    for update in updates:
        for name, tensor in update.delta.items():
            total[name] = total[name] + tensor if name in total else tensor
    counts = total.pop(COUNTS)
    present = counts > 0
    scored = [scores(t / counts.clamp_min(1)[:, None], present, target) for t in total.values()]
    return hold(P.clone(params), layers, choose(scored, pruned(params, layers), settings))


def choose(scored: list[Tensor], gone: list[Tensor], settings: Fump) -> list[Tensor]:
    """Mark the channels to prune beside those that are gone already: one ranking over all layers."""
    ranked = torch.cat(scored)
    places = [(layer, j) for layer, own in enumerate(scored) for j in range(len(own))]
    order = torch.sort(ranked, descending=settings.side == "top", stable=True).indices.tolist()
    marked = [mask.clone() for mask in gone]
    wanted = max(1, round(settings.prune * len(ranked)))
    for channel in order:
        layer, j = places[channel]
        if wanted == 0:
            break
        if marked[layer][j] or int((~marked[layer]).sum()) == 1:
            continue
        marked[layer][j] = True
        wanted -= 1
    return marked


def pruned(params: Params, layers: Layers) -> list[Tensor]:
    """Tell of each layer which channels have been pruned: those of which nothing but zeros is left."""
    found = []
    for layer in layers:
        parts = [params[name] for name in layer.tensors]
        found.append((torch.cat([part.reshape(len(part), -1) for part in parts], dim=1) == 0).all(1))
    return found


def hold(params: Params, layers: Layers, masks: list[Tensor]) -> Params:
    """Set the marked channels to zero, in place."""
    for layer, mask in zip(layers, masks, strict=True):
        for name in layer.tensors:
            tensor = params[name]
            tensor.masked_fill_(mask.view(-1, *[1] * (tensor.ndim - 1)), 0)
    return params


def recover_step(
    client: ClientState, params: Params, *, stage: Stage, view: View, ctx: RoundContext, compute: Compute
) -> tuple[ClientState, ClientUpdate]:
    """Local SGD under the masks that the model itself carries."""
    layers = compute.model.prunable
    held = partial(hold, layers=layers, masks=P.move(pruned(params, layers), compute.device))
    return local_sgd.run(client, params, stage=stage, view=view, ctx=ctx, compute=compute, after_step=held)


def recover_server_step(params: Params, updates: Updates, ctx: RoundContext, *, layers: Layers) -> Params:
    """FedAvg under the same masks."""
    return hold(fedavg.server_step(params, updates, ctx), layers, pruned(params, layers))


def refuses(model: Model) -> str | None:
    """Say why a network cannot be pruned, if it cannot."""
    return None if model.prunable else "it prunes channels, and this network names none (the attribute prunable)"


def phases(hyper: Hyperparameters, settings: Fump, request: UnlearningRequest, history: History) -> list[Phase]:
    """One round of statistics and pruning, then recovery; relearning is not possible."""
    everything = View("real", without=request.previously_forgotten)
    stage = replace(hyper.train, rounds=1, participation=1.0, stop="rounds")
    (target,) = request.forget.classes
    layers = hyper.model.prunable
    recover = fedavg.recover(hyper, request, settings.recover_rounds)
    return [
        replace(
            fedavg.phase("unlearn", stage, everything),
            client_step=partial(statistics, batch_size=stage.batch_size, view=everything, hook=settings.hook),
            server_step=partial(prune, layers=layers, settings=settings, target=target),
            reads_once=True,
        ),
        replace(
            recover,
            client_step=partial(recover_step, stage=recover.stage, view=recover.view),
            server_step=partial(recover_server_step, layers=layers),
        ),
    ]
