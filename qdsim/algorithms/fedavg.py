"""The server's part of every method: who takes part, and the weighted mean (Algorithm 1, line 17).

McMahan et al. Communication-efficient learning of deep networks from decentralized data. AISTATS 2017.

Departures from the paper: none. The mean of the models is formed as θ + Σ |Z_i|/|Z| (θ_i - θ), with Z taken
over the round's participants.
"""

from functools import partial

import numpy as np
import torch

from qdsim.algorithms import local_sgd
from qdsim.algorithms.phase import Phase, RoundContext, Updates
from qdsim.algorithms.server import MEAN, Server
from qdsim.algorithms.settings import Hyperparameters, Stage
from qdsim.algorithms.stopping import FORGOT, RECOVERED, RELEARNED, Rule
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models import params as P
from qdsim.models.params import Params


def select(sizes: np.ndarray, ctx: RoundContext, *, participation: float) -> list[int]:
    """Draw the participants among the clients with non-empty Z_i (footnotes 1 and 2), in client order."""
    holders = np.flatnonzero(sizes)
    wanted = max(1, round(participation * len(holders)))
    if wanted >= len(holders):
        return [int(i) for i in holders]
    drawn = torch.randperm(len(holders), generator=ctx.generator("participants"))[:wanted].numpy()
    return [int(i) for i in np.sort(holders[drawn])]


def server_step(params: Params, updates: Updates, ctx: RoundContext) -> Params:
    """θ ← θ + Σ |Z_i|/|Z| Δ_i."""
    return P.add_weighted_mean(params, ((update.num_samples, update.delta) for update in updates))


def phase(name: str, stage: Stage, view: View, rule: Rule | None = None, server: Server = MEAN) -> Phase:
    """Plain FedAvg on a view: training without distillation, retraining, recovery, relearning.

    ``server``: what the server makes of the mean; a phase of descent takes it from ``hyper.server``.
    """
    return Phase(
        name=name,
        stage=stage,
        view=view,
        select=partial(select, participation=stage.participation),
        client_step=partial(local_sgd.run, stage=stage, view=view),
        server_step=server_step,
        server=server,
        rule=rule,
    )


def forgot(request: UnlearningRequest) -> Rule | None:
    """Return the rule that ends ascent: none at client level, where only retraining tells what F-Set should be."""
    return None if request.forget.clients else FORGOT


def recover(hyper: Hyperparameters, request: UnlearningRequest, rounds: int) -> Phase:
    """Recovery of the baselines: rounds of training as it was, on D without what is gone (Algorithm 1)."""
    as_trained = hyper.train
    stage = Stage(
        rounds,
        as_trained.steps,
        as_trained.batch_size,
        as_trained.lr,
        as_trained.participation,
        hyper.recover.stop,
        as_trained.proximal,
    )
    return phase("recover", stage, View("real", without=request.forgotten), RECOVERED, hyper.server)


def relearn(hyper: Hyperparameters, request: UnlearningRequest) -> Phase:
    """Relearning of the baselines: descent on D_f (§4.7), or on all that was not forgotten before."""
    only = None if hyper.relearn.data == "mixed" else request.forget
    view = View("real", only=only, without=request.previously_forgotten)
    return phase("relearn", hyper.relearn, view, RELEARNED, hyper.server)
