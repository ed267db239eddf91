"""The server's part of every method: who takes part, and the weighted mean (Algorithm 1, line 17).

McMahan et al. Communication-efficient learning of deep networks from decentralized data. AISTATS 2017.

Departures from the paper: none. The mean of the models is formed as θ + Σ |Z_i|/|Z| (θ_i - θ), with Z taken
over the round's participants.
"""

from functools import partial

import numpy as np
import torch

from qdsim.algorithms import local_sgd
from qdsim.algorithms.phase import Assignment, Phase, Updates
from qdsim.algorithms.settings import Hyperparameters, Stage
from qdsim.algorithms.stopping import FORGOT, RECOVERED, RELEARNED, Rule
from qdsim.data.forgetting import Branch, View
from qdsim.models import params as P
from qdsim.models.params import Params


def select(sizes: np.ndarray, names: Assignment, *, participation: float) -> list[int]:
    """Draw the participants among the clients with non-empty Z_i (footnotes 1 and 2), in client order."""
    holders = np.flatnonzero(sizes)
    wanted = max(1, round(participation * len(holders)))
    if wanted >= len(holders):
        return [int(i) for i in holders]
    drawn = torch.randperm(len(holders), generator=names.generator("participants"))[:wanted].numpy()
    return [int(i) for i in np.sort(holders[drawn])]


def server_step(params: Params, updates: Updates, names: Assignment) -> Params:
    """θ ← θ + Σ |Z_i|/|Z| Δ_i."""
    return P.add_weighted_mean(params, ((update.num_samples, update.delta) for update in updates))


def phase(name: str, stage: Stage, view: View, rule: Rule | None = None) -> Phase:
    """Plain FedAvg on a view: training without distillation, retraining, recovery, relearning."""
    return Phase(
        name=name,
        stage=stage,
        view=view,
        select=partial(select, participation=stage.participation),
        client_step=partial(local_sgd.run, stage=stage, view=view),
        server_step=server_step,
        rule=rule,
    )


def forgot(branch: Branch) -> Rule | None:
    """Return the rule that ends ascent: none at client level, where only retraining tells what F-Set should be."""
    return None if branch.forget.clients else FORGOT


def recover(hyper: Hyperparameters, branch: Branch, rounds: int) -> Phase:
    """Recovery of the baselines: rounds of training as it was, on D without what is gone (Algorithm 1)."""
    as_trained = hyper.train
    stage = Stage(
        rounds,
        as_trained.steps,
        as_trained.batch_size,
        as_trained.lr,
        as_trained.participation,
        hyper.recover.stop,
    )
    return phase("recover", stage, View("real", without=branch.gone), RECOVERED)


def relearn(hyper: Hyperparameters, branch: Branch) -> Phase:
    """Relearning of the baselines: descent on D_f (§4.7), or on all that was not forgotten before."""
    only = None if hyper.relearn.data == "mixed" else branch.forget
    return phase("relearn", hyper.relearn, View("real", only=only, without=branch.earlier), RELEARNED)
