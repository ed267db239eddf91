"""What the simulator asks of a network: a function of its parameters, which travel separately."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qdsim.errors import BadInput
from qdsim.models.params import Params


@dataclass(frozen=True)
class PrunableLayer:
    """Channels that FU-MP may prune: with row j of these tensors at zero, channel j is silent."""

    tensors: tuple[str, ...]
    """Names of the parameters that a channel's output depends on, one row a channel."""
    activation: str = ""
    """The submodule whose output, (n, channels, ...), is a channel's activity after normalisation and ReLU."""
    convolution: str = ""
    """The submodule that is the bare convolution."""


class Model(Protocol):
    """A network. It is a value: equal descriptions are equal networks, and it travels to other processes as one."""

    @property
    def channels(self) -> int:
        """Colour channels of an image."""

    @property
    def size(self) -> int:
        """Height and width of an image in pixels."""

    @property
    def num_classes(self) -> int:
        """C."""

    @property
    def num_params(self) -> int:
        """How many numbers :meth:`init` returns."""

    @property
    def forward_flops(self) -> int:
        """Operations for one image."""

    @property
    def activation_bytes(self) -> int:
        """What one image's feature maps take in float32, once over."""

    @property
    def prunable(self) -> tuple[PrunableLayer, ...]:
        """The layers whose channels FU-MP may prune; empty where it may prune none."""

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Params:
        """Draw θ_0 from a generator and nothing else."""

    def forward(self, params: Params, images: Tensor) -> Tensor:
        """Return logits (n, num_classes) for normalised images (n, c, h, w); no sample's depend on another's."""

    def features(self, params: Params, images: Tensor) -> Tensor:
        """Return what the classifier sees, (n, features): the input of the last linear layer that is executed."""

    def activity(self, params: Params, images: Tensor, hook: str) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and for each prunable layer the mean activity of every channel (n, channels).

        ``hook``: ``activation`` reads after normalisation and ReLU, ``convolution`` the ReLU of the bare convolution.
        """

    def describe(self) -> dict[str, Any]:
        """Return what the description of a training says of it, as JSON."""


def check_params(model: Model, params: Params, source: object, fix: str) -> Params:
    """Return the parameters if they are this network's; else name where they came from and what is wrong."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.init(torch.Generator()).items()}
    found = {name: tuple(tensor.shape) for name, tensor in params.items()}
    odd = [name for name in expected | found if expected.get(name) != found.get(name)]
    if odd:
        shapes = f"{odd[0]} is {found.get(odd[0], 'not there')}, here {expected.get(odd[0], 'unknown')}"
        raise BadInput("file", str(source), f"holds another model: {shapes}; {fix}")
    return params
