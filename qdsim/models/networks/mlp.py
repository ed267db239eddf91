"""A multilayer perceptron with ReLU; with 200 and 200 units the "2NN" of McMahan et al. (AISTATS 2017)."""

import itertools
from collections.abc import Sequence

from torch import nn


def mlp(*, channels: int, size: int, num_classes: int, hidden: Sequence[int] = (200, 200)) -> nn.Module:
    """Return a network with these hidden layers; an empty list leaves a linear classifier."""
    widths = [channels * size * size, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
