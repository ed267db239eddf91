"""The paper's ConvNet [W, N, A, P] x D (§4.1) as a function of its parameters.

Each of D blocks is a 3x3 convolution with W filters, instance normalisation, ReLU and 2x2 average
pooling; a linear classifier follows. Kept from the official code: instance normalisation is group
normalisation with one group per channel and an affine map, so there are no running statistics to
average; 28x28 inputs take padding 3 in the first convolution and so behave like 32x32.

The network is a pure function ``forward(params, images)``: a client step is a function of values, and
gradients of gradients need no module state.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.models.model import PrunableLayer
from qdsim.models.params import Params

NORM_EPS = 1e-5


@dataclass(frozen=True)
class ConvNet:
    """Shape of the network; the parameters travel separately."""

    channels: int
    """Colour channels of an image."""
    size: int
    """Height and width of an image in pixels."""
    num_classes: int
    """C."""
    width: int = 128
    """W, filters per convolution."""
    depth: int = 3
    """D, number of blocks."""
    autograd: bool = False
    """Take autograd's gradients instead of those written out in ``fast/``: equal up to rounding, and slower."""

    @property
    def first_padding(self) -> int:
        """Padding of the first convolution: 3 for 28x28 inputs, which makes them 32x32."""
        return 3 if self.size == 28 else 1

    @property
    def feature_size(self) -> int:
        """Height and width that are left before the classifier."""
        return (self.size + 2 * self.first_padding - 2) >> self.depth

    @property
    def num_params(self) -> int:
        """How many numbers :meth:`init` draws."""
        convolutions = 9 * self.width * (self.channels + (self.depth - 1) * self.width) + 3 * self.width * self.depth
        return convolutions + self.num_classes * (self.width * self.feature_size**2 + 1)

    @property
    def forward_flops(self) -> int:
        """Operations for one image, those of the convolutions and the classifier."""
        size = self.size + 2 * self.first_padding - 2
        total, inputs = 0, self.channels
        for block in range(self.depth):
            total += 2 * 9 * inputs * self.width * (size >> block) ** 2
            inputs = self.width
        return total + 2 * self.num_classes * self.width * self.feature_size**2

    @property
    def activation_bytes(self) -> int:
        """What one image's feature maps take in float32, once over."""
        first = self.size + 2 * self.first_padding - 2
        return 4 * self.width * sum((first >> block) ** 2 for block in range(self.depth))

    @property
    def prunable(self) -> tuple[PrunableLayer, ...]:
        """Every block: a zeroed filter alone would not silence its channel, since normalisation turns it into β."""
        of_channel = ("conv{}.weight", "conv{}.bias", "norm{}.weight", "norm{}.bias")
        return tuple(PrunableLayer(tuple(name.format(block) for name in of_channel)) for block in range(self.depth))

    def describe(self) -> dict[str, Any]:
        """Return its shape; autograd is named where it is asked for."""
        found = asdict(self)
        if not self.autograd:
            del found["autograd"]
        return found

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Params:
        """Draw θ_0 as PyTorch's own layers do: uniform in ±1/sqrt(fan_in), γ = 1, β = 0."""

        def uniform(*shape: int, fan_in: int) -> Tensor:
            bound = 1 / math.sqrt(fan_in)
            return torch.empty(*shape, dtype=dtype).uniform_(-bound, bound, generator=generator)

        params: Params = {}
        inputs = self.channels
        for block in range(self.depth):
            fan_in = inputs * 9
            params[f"conv{block}.weight"] = uniform(self.width, inputs, 3, 3, fan_in=fan_in)
            params[f"conv{block}.bias"] = uniform(self.width, fan_in=fan_in)
            params[f"norm{block}.weight"] = torch.ones(self.width, dtype=dtype)
            params[f"norm{block}.bias"] = torch.zeros(self.width, dtype=dtype)
            inputs = self.width
        features = self.width * self.feature_size**2
        params["linear.weight"] = uniform(self.num_classes, features, fan_in=features)
        params["linear.bias"] = uniform(self.num_classes, fan_in=features)
        return params

    def forward(self, params: Params, images: Tensor) -> Tensor:
        """Return logits (n, num_classes) for normalised images (n, c, h, w)."""
        return F.linear(self.features(params, images), params["linear.weight"], params["linear.bias"])

    def features(self, params: Params, images: Tensor) -> Tensor:
        """Return what the classifier sees, (n, features)."""
        x = images
        for block in range(self.depth):
            _, activated = self._block(params, x, block)
            x = F.avg_pool2d(activated, 2)
        return x.flatten(1)

    def activity(self, params: Params, images: Tensor, hook: str) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and for each block the mean activity of every channel (n, width).

        ``hook``: ``activation`` reads after normalisation and ReLU, ``convolution`` the ReLU of the bare convolution.
        """
        x, found = images, []
        for block in range(self.depth):
            convolved, activated = self._block(params, x, block)
            found.append((activated if hook == "activation" else F.relu(convolved)).mean((2, 3)))
            x = F.avg_pool2d(activated, 2)
        return F.linear(x.flatten(1), params["linear.weight"], params["linear.bias"]), found

    def _block(self, params: Params, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return a block's convolution, and that normalised and rectified; pooling follows."""
        padding = self.first_padding if block == 0 else 1
        convolved = F.conv2d(x, params[f"conv{block}.weight"], params[f"conv{block}.bias"], padding=padding)
        gamma, beta = params[f"norm{block}.weight"], params[f"norm{block}.bias"]
        return convolved, F.relu(F.group_norm(convolved, self.width, gamma, beta, NORM_EPS))
