"""FedEraser: replay training without the forget set, with stored lengths and fresh directions.

Liu, Ma, Yang, Wang, Liu. FedEraser: enabling efficient client-level data removal from federated learning models.
IWQoS 2021.

Departures from FedEraser's paper: (1) the mean over clients is a plain weighted one; the paper's formula carries
another 1/(K - 1), which would shrink every step so many times. (2) Only the lengths of updates are stored, and the
first round's updates whole: calibration uses nothing else, so the result is the same. (3) Lengths are taken per
tensor, as in the authors' code (``norm = "model"``: of the whole update). (4) Class level, which FedEraser does not
treat: every client that has anything left takes part, calibrates on what is left, and the first round is
calibrated too, since the stored one holds the class. (5) Calibration of round t draws its mini-batches as training did
in round t, so with nobody removed, Δt = 1 and r = 1 it repeats training.
Departures from the authors' code: there the stored length is measured against the global model *after* the round,
which leaves about 1/N of it, and the first, uncalibrated step already contains the target. Neither is followed.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from qdsim.algorithms import fedavg, local_sgd
from qdsim.algorithms.history import History, UpdateNorms
from qdsim.algorithms.methods import FedEraser
from qdsim.algorithms.phase import ClientUpdate, Phase, RoundContext, Updates
from qdsim.algorithms.settings import Hyperparameters, Stage
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.params import Params

EPS = 1e-12
NO_UPDATE = 1e-8
"""Shorter stored updates count as none: a convolution's bias before instance normalisation has no gradient."""


def retained_rounds(rounds: int, interval: int) -> list[int]:
    """t_1 = 1, t_2 = 1 + Δt, …: the ⌊K / Δt⌋ rounds of training that are replayed, at least one."""
    return [1 + j * interval for j in range(max(1, rounds // interval))]


def uses_stored_first(settings: FedEraser, request: UnlearningRequest) -> bool:
    """Tell whether round 1 applies the stored updates: they know nothing of a client that is left out."""
    wanted = settings.first_round
    return not request.forgotten.classes if wanted == "auto" else wanted == "stored"


def select(sizes: np.ndarray, ctx: RoundContext, *, history: History, interval: int, stored_first: bool) -> list[int]:
    """A_j: the participants of round t_j that still have data; none where nothing has to be computed."""
    t = _training_context(ctx, interval).round_number
    if stored_first and t == 1:
        return []
    return sorted(i for i in history.rounds[t] if sizes[i])


def calibrate(
    client: ClientState,
    params: Params,
    *,
    stage: Stage,
    view: View,
    interval: int,
    ctx: RoundContext,
    compute: Compute,
) -> tuple[ClientState, ClientUpdate]:
    """Û_k: ⌈r T⌉ local steps from the replayed model on what is left of D_k."""
    drawn = _training_context(ctx, interval)
    return local_sgd.run(client, params, stage=stage, view=view, ctx=drawn, compute=compute)


def server_step(
    params: Params,
    updates: Updates,
    ctx: RoundContext,
    *,
    history: History,
    interval: int,
    norm: str,
    stored_first: bool,
    request: UnlearningRequest,
) -> Params:
    """θ ← θ + Σ w_k Ũ_k; round 1 at client level: θ + Σ w_k U_k with the stored updates."""
    t = _training_context(ctx, interval).round_number
    recorded = history.rounds[t]
    if stored_first and t == 1:
        kept = [i for i in sorted(recorded) if i not in request.forgotten.clients]
        stored = ((recorded[i].num_samples, history.first[i]) for i in kept)
        return P.add_weighted_mean(params, stored) if kept else params
    calibrated = _calibrated(updates, recorded, norm)
    first = next(calibrated, None)
    if first is None:  # the round's participants have all been forgotten
        return params
    return P.add_weighted_mean(params, chain([first], calibrated))


def _calibrated(updates: Updates, recorded: dict[int, UpdateNorms], norm: str) -> Iterator[tuple[int, Params]]:
    for update in updates:
        yield update.num_samples, calibrated_update(update.delta, recorded[update.client_id].norms, norm)


def calibrated_update(fresh: Params, stored: dict[str, float], norm: str) -> Params:
    """Ũ = ||U|| · Û / (||Û|| + ε), tensor by tensor or for the model as one vector."""
    lengths = {n: float(torch.linalg.vector_norm(t, dtype=torch.float64)) for n, t in fresh.items()}
    if norm == "model":
        whole, now = math.hypot(*stored.values()), math.hypot(*lengths.values())
        stored, lengths = dict.fromkeys(fresh, whole), dict.fromkeys(fresh, now)
    scale = {n: stored[n] / (lengths[n] + EPS) if stored[n] >= NO_UPDATE else 0.0 for n in fresh}
    return {name: tensor * scale[name] for name, tensor in fresh.items()}


def phases(hyper: Hyperparameters, settings: FedEraser, request: UnlearningRequest, history: History) -> list[Phase]:
    """Replay from θ_0, recover on what is left, relearn."""
    retain = View("real", without=request.forgotten)
    steps = math.ceil(round(settings.calibration * hyper.train.steps, 9))  # 0.28 of 50 is 14
    # how many rounds training took is known afterwards only, where a convergence rule ended it
    trained = len(history.rounds) or hyper.train.rounds
    rounds = max(1, trained // settings.interval)  # as many as retained_rounds: a billion would fill the memory
    stage = replace(hyper.train, rounds=rounds, steps=steps, stop="rounds")
    interval, stored_first = settings.interval, uses_stored_first(settings, request)
    replay = replace(
        fedavg.phase("unlearn", stage, retain),
        select=partial(select, history=history, interval=interval, stored_first=stored_first),
        client_step=partial(calibrate, stage=stage, view=retain, interval=interval),
        server_step=partial(
            server_step,
            history=history,
            interval=interval,
            norm=settings.norm,
            stored_first=stored_first,
            request=request,
        ),
        start="initial",
    )
    return [replay, fedavg.recover(hyper, request, settings.recover_rounds), fedavg.relearn(hyper, request)]


def storage_bytes(
    hyper: Hyperparameters, settings: FedEraser, request: UnlearningRequest, history: History
) -> tuple[int, int]:
    """What the server keeps for this request, and by the paper's accounting (every update of a retained round)."""
    rounds = retained_rounds(len(history.rounds), settings.interval)
    return history.storage_bytes(rounds, whole_first=uses_stored_first(settings, request))


def _training_context(ctx: RoundContext, interval: int) -> RoundContext:
    """Names of the training round t_j that round j replays."""
    return RoundContext(ctx.run_seed, "", "train", 1 + (ctx.round_number - 1) * interval)
