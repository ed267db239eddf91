"""A small ResNet for 32x32 images (He et al., CVPR 2016, §4.2) with group normalisation (Wu and He, ECCV 2018).

Batch normalisation would let a sample's gradient depend on the others of its batch, so a batch's gradient would no
longer be the sum of its classes' gradients, which matching needs; and its running statistics belong to nobody in a
federation. Group normalisation has neither trouble, and is what federated learning usually takes (Hsieh et al., ICML
2020).
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from qdsim.models.model import PrunableLayer

MOST_GROUPS = 8


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group normalisation with as many groups as divide the channels, eight at most."""
    return nn.GroupNorm(math.gcd(channels, MOST_GROUPS), channels)


class Block(nn.Module):
    """Two 3x3 convolutions beside an identity; where the shape changes, beside a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = group_norm(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = group_norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), group_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(F(x) + x)."""
        inner = self.relu1(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 convolution, three stages of blocks at full, half and quarter size, a mean over positions, a classifier."""

    def __init__(self, channels: int, num_classes: int, width: int, blocks: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = group_norm(width)
        stages, inputs = [], width
        for stage in range(3):
            outputs = width << stage
            for block in range(blocks):
                stages.append(Block(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.linear = nn.Linear(inputs, num_classes)

    @property
    def prunable(self) -> tuple[PrunableLayer, ...]:
        """The inner channels of each block: what flows past it on the shortcut is nobody's channel alone."""
        return tuple(
            PrunableLayer(
                (f"blocks.{i}.conv1.weight", f"blocks.{i}.norm1.weight", f"blocks.{i}.norm1.bias"),
                activation=f"blocks.{i}.relu1",
                convolution=f"blocks.{i}.conv1",
            )
            for i in range(len(self.blocks))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.norm(self.conv(x)))
        return self.linear(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


def resnet(*, channels: int, size: int, num_classes: int, width: int = 16, depth: int = 8) -> nn.Module:
    """Return a network of ``depth`` = 6n + 2 layers: 8 by default, 20, 32, 44, 56 and 110 in the paper."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth is {depth}; a ResNet of this kind has 6n + 2 layers: 8, 14, 20, 32, ...")
    return ResNet(channels, num_classes, width, (depth - 2) // 6)
