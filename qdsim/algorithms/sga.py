"""SGA-Or: gradient ascent on the forget set's real samples, then recovery on the rest (Algorithm 1).

Wu et al. Federated unlearning: guarantee the right of clients to forget. IEEE Network 2022, as evaluated in the
paper: FedAvg by the clients that hold any of D_f, weighted by |Z_i|, two rounds of each.

Departures from the paper: ascent stops at ``max_loss`` (see :mod:`local_sgd`); ``unlearn.max_loss = "none"`` is the
literal version. Two other objectives are offered, neither is the default:
``reflect`` descends on D_f and mirrors the displacement, θ + (θ - θ'), which is what the official code does in place
of ascent: the same for one step, bounded for many, since descent's gradients vanish.
``bounded`` descends on -log(1 - p_y / 2) (Pan et al., FedOSD, AAAI 2025), whose minimum is at p_y = 0.
Not followed from Wu et al.: elastic weight consolidation and the server's own data, which the paper does not use.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qdsim.algorithms import fedavg, local_sgd
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import Sga
from qdsim.algorithms.phase import ClientStep, ClientUpdate, Phase
from qdsim.algorithms.settings import Hyperparameters
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models.params import Params


def bounded_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log(1 - p_y / 2), summed over samples: log 2 where the model is sure, 0 where it has forgotten."""
    answers = torch.arange(logits.shape[1], device=logits.device)
    # not gather, whose derivative sums by atomics on a GPU; what is added to p_y are zeros
    p = torch.where(labels[:, None] == answers, torch.softmax(logits, dim=1), 0).sum(1, keepdim=True)
    return -torch.log1p(-p / 2).sum()


def reflect(client: ClientState, params: Params, **settings: Any) -> tuple[ClientState, ClientUpdate]:
    """Descend on Z_i and send the displacement mirrored."""
    client, update = local_sgd.run(client, params, **settings)
    update.delta = {name: -tensor for name, tensor in update.delta.items()}
    return client, update


def phases(hyper: Hyperparameters, settings: Sga, request: UnlearningRequest, history: History) -> list[Phase]:
    """Unlearn on D_f, recover on the rest, relearn; all on real data."""
    forget = View("real", only=request.forget, without=request.previously_forgotten)
    stage = replace(hyper.unlearn, rounds=settings.unlearn_rounds)
    steps: dict[str, ClientStep] = {
        "ascent": partial(local_sgd.run, stage=stage, view=forget, ascend=True, max_loss=hyper.max_loss),
        "reflect": partial(reflect, stage=stage, view=forget),
        "bounded": partial(local_sgd.run, stage=stage, view=forget, objective=bounded_loss),
    }
    return [
        replace(fedavg.phase("unlearn", stage, forget, fedavg.forgot(request)), client_step=steps[settings.mode]),
        fedavg.recover(hyper, request, settings.recover_rounds),
        fedavg.relearn(hyper, request),
    ]
