"""LeNet-5 (LeCun et al., 1998) as it is taught today: ReLU and max pooling, no normalisation."""

from collections import OrderedDict

from torch import nn

from qdsim.models.model import PrunableLayer


def lenet(*, channels: int, size: int, num_classes: int, width: int = 6) -> nn.Module:
    """Return a network whose convolutions have ``width`` and 8/3 as many filters of 5x5."""
    if size < 12:
        raise ValueError(f"images have {size}x{size} pixels; LeNet takes 12x12 or more")
    wide = 8 * width // 3
    # padded, so that 28x28 becomes 14x14, as the 32x32 of LeCun's images do without
    left = (size // 2 - 4) // 2
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, width, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(width, wide, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            linear1=nn.Linear(wide * left * left, 120),
            relu3=nn.ReLU(),
            linear2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            linear3=nn.Linear(84, num_classes),
        )
    )
    network.prunable = tuple(  # type: ignore[assignment]  # what FU-MP asks for, see models/module.py
        PrunableLayer((f"conv{i}.weight", f"conv{i}.bias"), activation=f"relu{i}", convolution=f"conv{i}")
        for i in (1, 2)
    )
    return network
