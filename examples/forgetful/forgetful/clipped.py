"""A server rule of one's own: the mean, but never a longer step than ``server.tau`` times the model's own length."""

import math

from qdsim.algorithms.server import Server
from qdsim.models.params import Params


def clipped(params: Params, delta: Params, state: Params, settings: Server) -> tuple[Params, Params]:
    """Return the server's step, and what it remembers: nothing."""
    length, own = _length(delta), _length(params)
    scale = min(1.0, settings.tau * own / length) if length else 1.0
    return {name: settings.rate * scale * tensor for name, tensor in delta.items()}, {}


def _length(params: Params) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in params.values()))
