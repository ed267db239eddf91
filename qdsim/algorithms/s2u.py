"""S2U: scale the leaving client's updates down and the others' up, for a few rounds of ordinary training.

Gao et al. VeriFi: towards verifiable federated unlearning. IEEE TDSC 2024.

θ ← θ + β p_u Δ_u + γ Σ_{k≠u} p_k Δ_k,  0 ≤ β < 1 < γ. The leaver still takes part, which is what VeriFi's
verification needs; with partial participation it is added to every round's participants, or nothing would happen.
Unlearning and recovery are one (§2.3); ``s2u.recover_rounds`` adds rounds without the leaver.

Departures: the factors and the number of rounds stand in no public source. By default β = 0.1 and γ keeps the total
weight at 1, γ = (1 - β p_u) / (1 - p_u), so that the step neither grows nor shrinks; updates are scaled, never weights.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from qdsim.algorithms import fedavg
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import S2u
from qdsim.algorithms.phase import Phase, RoundContext, Updates
from qdsim.algorithms.settings import Hyperparameters
from qdsim.algorithms.stopping import RETRAINED
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models import params as P
from qdsim.models.params import Params


def select(sizes: np.ndarray, ctx: RoundContext, *, participation: float, leavers: frozenset[int]) -> list[int]:
    """The round's participants, the leaver among them."""
    drawn = fedavg.select(sizes, ctx, participation=participation)
    return sorted({*drawn, *(i for i in leavers if sizes[i])})


def server_step(
    params: Params,
    updates: Updates,
    ctx: RoundContext,
    *,
    leavers: frozenset[int],
    leaver_factor: float,
    others_factor: float | Literal["auto"],
) -> Params:
    """θ ← θ + β p_u Δ_u + γ Σ p_k Δ_k, with p over the round's participants."""
    leaving = P.WeightedSum(params)
    staying = P.WeightedSum(params)
    for update in updates:
        (leaving if update.client_id in leavers else staying).add(update.num_samples, update.delta)
    total = leaving.weight + staying.weight
    if isinstance(others_factor, str):
        p_u = leaving.weight / total
        others_factor = (1 - leaver_factor * p_u) / (1 - p_u) if p_u < 1 else 1.0
    return P.add_sums(params, [(leaver_factor / total, leaving), (others_factor / total, staying)])


def phases(hyper: Hyperparameters, settings: S2u, request: UnlearningRequest, history: History) -> list[Phase]:
    """Scaled rounds by everybody, then, where asked for, rounds without the leaver; then relearning."""
    stage = replace(hyper.train, rounds=settings.rounds, stop=hyper.unlearn.stop)
    leavers = request.forget.clients
    scaled = replace(
        fedavg.phase("unlearn", stage, View("real", without=request.previously_forgotten), RETRAINED),
        select=partial(select, participation=stage.participation, leavers=leavers),
        server_step=partial(server_step, leavers=leavers, leaver_factor=settings.leaver, others_factor=settings.others),
    )
    return [scaled, fedavg.recover(hyper, request, settings.recover_rounds), fedavg.relearn(hyper, request)]
