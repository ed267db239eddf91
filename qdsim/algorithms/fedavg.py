"""The server's part of every method: who takes part, and the weighted mean (Algorithm 1, line 17).

McMahan et al. Communication-efficient learning of deep networks from decentralized data. AISTATS 2017.

Departures from the paper: none. The mean of the models is formed as θ + Σ |Z_i|/|Z| (θ_i - θ), with Z taken
over the round's participants.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from qdsim import params as P
from qdsim.algorithms import local_sgd
from qdsim.forgetting import View
from qdsim.hyper import Stage
from qdsim.params import Params
from qdsim.phases import ClientUpdate, Phase


def select(sizes: np.ndarray, participation: float, generator: torch.Generator) -> list[int]:
    """Draw the participants among the clients with non-empty Z_i (footnotes 1 and 2), in client order."""
    holders = np.flatnonzero(sizes)
    wanted = max(1, round(participation * len(holders)))
    if wanted >= len(holders):
        return [int(i) for i in holders]
    drawn = torch.randperm(len(holders), generator=generator)[:wanted].numpy()
    return [int(i) for i in np.sort(holders[drawn])]


def server_step(params: Params, updates: Iterable[ClientUpdate]) -> Params:
    """θ ← θ + Σ |Z_i|/|Z| Δ_i."""
    return P.add_weighted_mean(params, ((update.num_samples, update.delta) for update in updates))


def phase(name: str, stage: Stage, view: View, *, fresh_start: bool = False) -> Phase:
    """Plain FedAvg on a view: recovery, relearning, retraining, and training without distillation."""
    return Phase(
        name=name,
        stage=stage,
        view=view,
        client_step=partial(local_sgd.run, stage=stage, view=view),
        server_step=server_step,
        fresh_start=fresh_start,
    )
