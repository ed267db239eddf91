"""A network of one's own: two paths, of small and of large filters, that meet before the classifier."""

import torch
from torch import Tensor, nn


class TwoPaths(nn.Module):
    """Group normalisation, not batch normalisation: no sample may see another of its batch."""

    def __init__(self, channels: int, num_classes: int, width: int):
        super().__init__()
        self.fine = nn.Conv2d(channels, width, 3, padding=1)
        self.coarse = nn.Conv2d(channels, width, 5, padding=2)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.mix = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        both = torch.cat([self.fine(images), self.coarse(images)], dim=1)
        mixed = torch.relu(self.mix(torch.relu(self.norm(both))))
        return self.classifier(mixed.amax((2, 3)))


def two_paths(*, channels: int, size: int, num_classes: int, width: int = 8) -> nn.Module:
    """What ``model.kind`` names; ``width`` is set by ``model.options = {width = 16}``."""
    return TwoPaths(channels, num_classes, width)
