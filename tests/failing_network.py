"""A network in which a client's actor meets an error of a GPU: torch's own exceptions, raised where it computes."""

from pathlib import Path

import torch
from torch import Tensor, nn

TOO_LARGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.20 GiB is free."
)


class Failing(nn.Module):
    """Two layers; ``when`` a gradient is taken or the model is evaluated in an actor, it fails, once."""

    def __init__(self, channels: int, size: int, num_classes: int, when: str, mark: str):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, num_classes))
        self.when, self.mark = when, Path(mark)

    def forward(self, images: Tensor) -> Tensor:
        """Fail, or compute."""
        doing = "step" if torch.is_grad_enabled() else "evaluation"
        if doing == self.when and not self.mark.exists() and in_an_actor():
            self.mark.touch()
            if doing == "step":
                raise torch.OutOfMemoryError(TOO_LARGE)
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
        logits: Tensor = self.layers(images)
        return logits


def in_an_actor() -> bool:
    """Tell whether this process owns clients: elsewhere the network is only looked at."""
    import ray

    return ray.is_initialized() and (ray.get_runtime_context().get_actor_name() or "").startswith("clients-")


def failing(channels: int, size: int, num_classes: int, *, when: str, mark: str) -> nn.Module:
    """Return the network."""
    return Failing(channels, size, num_classes, when, mark)
