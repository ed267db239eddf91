"""A client step that does nothing: what is left of a round is the simulator's own time."""

import torch

from qdsim.algorithms.phase import ClientUpdate, RoundContext
from qdsim.data.clients import ClientState
from qdsim.models.compute import Compute
from qdsim.models.params import Params


def step(
    client: ClientState, params: Params, *, ctx: RoundContext, compute: Compute
) -> tuple[ClientState, ClientUpdate]:
    """Send back an update of the model's size, all zeros."""
    delta = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    return client, ClientUpdate(client.client_id, len(client.labels), delta, loss=0.0, gradients=0, samples=0)
