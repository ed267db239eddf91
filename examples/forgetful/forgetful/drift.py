"""Drift: go on training without the forget set, from a model that noise has shaken, and let the rest fade.

The simplest thing that may be called unlearning, and a yardstick for what a cleverer method adds: fine-tuning on the
retain set, as many papers have it among their baselines, here after Gaussian noise on the weights of a share of each
tensor's own deviation. All that qdsim needs to know of it stands in this file: what it is called, what it may be asked,
its settings with their ranges and defaults, and its phases.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge

from qdsim.algorithms import fedavg
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import Method
from qdsim.algorithms.phase import Phase, RoundContext, Updates
from qdsim.algorithms.settings import Hyperparameters
from qdsim.algorithms.stopping import RETRAINED
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models.params import Params
from qdsim.ranges import Positive


@dataclass(frozen=True)
class Drift:
    """In a job under ``[drift]``; every other setting is that of ``[train]``."""

    rounds: Positive = 4
    """Rounds without the forget set."""
    noise: Annotated[float, Ge(0)] = 0.1
    """Share of each tensor's deviation that the noise has."""


METHOD = Method("drift", "Drift", module=__name__, settings=Drift)


def shake(params: Params, updates: Updates, ctx: RoundContext, *, noise: float) -> Params:
    """Add noise in the first round, drawn in the order of the parameters; then FedAvg on what the clients send."""
    averaged = fedavg.server_step(params, updates, ctx)
    if ctx.round_number > 1 or not noise:
        return averaged
    draws = ctx.generator("drift-noise")
    shaken = {}
    for name, tensor in averaged.items():
        spread = noise * float(tensor.std()) if tensor.numel() > 1 else 0.0
        shaken[name] = tensor + spread * torch.randn(tensor.shape, generator=draws, dtype=tensor.dtype)
    return shaken


def phases(hyper: Hyperparameters, settings: Drift, request: UnlearningRequest, history: History) -> list[Phase]:
    """Rounds of training without what is to be forgotten; then relearning, as every method has it."""
    stage = replace(hyper.train, rounds=settings.rounds)
    retain = View("real", without=request.forgotten)
    unlearn = fedavg.phase("unlearn", stage, retain, RETRAINED, hyper.server)
    unlearn = replace(unlearn, server_step=partial(shake, noise=settings.noise))
    return [unlearn, fedavg.relearn(hyper, request)]
