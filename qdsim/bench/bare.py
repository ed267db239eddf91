"""FedAvg as anybody would write it in PyTorch: one process, an ``nn.Module``, autograd, the batch in one piece.

``python -m qdsim.bench.bare --width 32 --steps 4`` prints what it measured as JSON. It uses nothing of qdsim.
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def network(width: int, channels: int, size: int) -> nn.Sequential:
    """The paper's ConvNet, as in its official code."""
    layers: list[nn.Module] = []
    inputs = channels
    for block in range(3):
        layers.append(nn.Conv2d(inputs, width, 3, padding=3 if size == 28 and block == 0 else 1))
        layers += [nn.GroupNorm(width, width), nn.ReLU(), nn.AvgPool2d(2)]
        inputs = width
    side = 4 if size == 28 else size // 8
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side**2, 10))


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """One local step."""
    optimizer.zero_grad()
    F.cross_entropy(model((images.float() / 255 - 0.5) / 0.25), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def local(arrays: list[Any], width: int, channels: int, size: int, steps: int, batch: int) -> list[Any]:
    """A client's local steps, from parameters to parameters: what a framework around the loop would call."""
    torch.set_num_threads(1)
    model = network(width, channels, size)
    model.load_state_dict(dict(zip(model.state_dict(), map(torch.from_numpy, arrays), strict=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        images = torch.randint(0, 256, (batch, channels, size, size), dtype=torch.uint8)
        step(model, optimizer, images, torch.randint(0, 10, (batch,)))
    return [value.numpy() for value in model.state_dict().values()]


def train(width: int, clients: int, steps: int, batch: int, channels: int, size: int, rounds: int) -> list[float]:
    """Return the seconds of each round of FedAvg over clients of 1,000 images, after one to warm up."""
    torch.manual_seed(0)
    pool = torch.randint(0, 256, (clients, 1000, channels, size, size), dtype=torch.uint8)
    labels = torch.randint(0, 10, (clients, 1000))
    model = network(width, channels, size)
    found = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for i in range(clients):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(steps):
                chosen = torch.randint(0, 1000, (batch,))
                step(model, optimizer, pool[i, chosen], labels[i, chosen])
            for name, value in model.state_dict().items():
                total[name] += value / clients
        model.load_state_dict(total)
        found.append(time.perf_counter() - began_s)
    return found[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("width", 32), ("clients", 10), ("steps", 4), ("batch", 256), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--size", type=int, default=32)
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    print(json.dumps(train(**given)))
