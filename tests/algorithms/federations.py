"""A federation of three toy clients, and the round loop by hand on values."""

import numpy as np
import torch

from qdsim.algorithms import server
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import ClientUpdate, Phase, RoundContext
from qdsim.data.clients import ClientState
from qdsim.data.forgetting import ForgetSet, UnlearningRequest
from qdsim.models.compute import Compute
from qdsim.models.params import Params
from tests.conftest import make_client, make_compute

LABELS = {0: [0] * 9 + [1] * 4, 1: [1] * 3 + [2] * 8, 2: [0, 2, 2, 2]}
COMPUTE = make_compute()
CLASS_2 = UnlearningRequest("class:2", ForgetSet(classes=frozenset([2])))
CLIENT_1 = UnlearningRequest("client:1", ForgetSet(clients=frozenset([1])))
NOBODY = UnlearningRequest("client:none", ForgetSet())


def clients() -> dict[int, ClientState]:
    """Three clients of 13, 11 and 4 samples."""
    return {i: make_client(i, labels) for i, labels in LABELS.items()}


def counts() -> np.ndarray:
    """|D_i^c|."""
    return np.array([np.bincount(labels, minlength=3) for labels in LABELS.values()])


def start(dtype: torch.dtype = torch.float64) -> Params:
    """θ_0."""
    return COMPUTE.model.init(torch.Generator().manual_seed(0), dtype)


def run(
    phase: Phase,
    params: Params,
    request: UnlearningRequest = NOBODY,
    history: History | None = None,
    seen: list[ClientUpdate] | None = None,
    compute: Compute = COMPUTE,
    owned: dict[int, ClientState] | None = None,
) -> Params:
    """Run a phase's rounds; record updates into ``history``, list them in ``seen``; ``owned`` clients change."""
    owned = clients() if owned is None else owned
    state: Params = {}
    sizes = phase.view.sizes(counts(), counts())
    label = "" if phase.name == "train" else request.label
    for number in range(1, phase.stage.rounds + 1):
        ctx = RoundContext(0, label, phase.name, number)
        updates = []
        for i in phase.select(sizes, ctx):
            owned[i], update = phase.client_step(owned[i], params, ctx=ctx, compute=compute)
            updates.append(update)
            if history is not None:
                history.record(number, i, update.num_samples, update.delta)
        if seen is not None:
            seen.extend(updates)
        params, state = server.step(phase.server, params, phase.server_step(params, updates, ctx), state)
    return params


def largest_difference(left: Params, right: Params) -> float:
    """Largest absolute difference of any entry."""
    return max(float((left[name] - right[name]).abs().max()) for name in left)
