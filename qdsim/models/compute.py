"""What a process computes with: the network, the device, and whose gradients it takes."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from qdsim.models.convnet import ConvNet
from qdsim.models.fast.cuda import Fused
from qdsim.models.fast.gradients import WrittenOut
from qdsim.models.fast.graph import Function, Graphs
from qdsim.models.gradients import Autograd, Gradients
from qdsim.models.model import Model
from qdsim.models.numerics import CPU_MICRO_BATCH, GPU_MICRO_BATCH, Numerics


@dataclass(frozen=True)
class Compute:
    """What a process computes with; the same for every client step it runs."""

    model: Model
    device: torch.device
    micro_batch: int
    """Gradients are summed over pieces of this many samples. Part of the configuration: it moves bits."""
    half: torch.dtype | None = None
    """What convolutions are computed in, if not in float32."""
    compiled: bool = False
    winograd: Literal["matching", "always", "never"] = "matching"
    graphs: Graphs = field(default_factory=Graphs, compare=False)

    @cached_property
    def gradients(self) -> Gradients:
        """The network's derivatives: written out for a ConvNet, unless it asks for autograd's; else autograd's."""
        model = self.model
        if isinstance(model, ConvNet) and not model.autograd:
            if self.device.type == "cuda":
                return Fused(model, self.micro_batch, self.half)
            return WrittenOut(model, self.micro_batch, self.half, self.compiled, self.winograd)
        return Autograd(model, self.device, self.micro_batch, self.half)

    def replayed(self, function: Function, calls: int) -> Function:
        """Return a function of tensors that may be captured as a CUDA graph, since it is called so often."""
        return self.graphs.replayed(function, calls) if self.gradients.all_classes else function


def make_compute(
    model: Model, device: torch.device, numerics: Numerics, cuda_graphs: Literal["off", "auto", "on"] = "off"
) -> Compute:
    """Return what a process computes with; a micro-batch of ``auto`` is 32 on the CPU, where the cache is short.

    On a GPU it is 256, the paper's batch, so that fine-tuning, whose batches hold so many of every class, fits as well.
    """
    micro_batch = CPU_MICRO_BATCH if device.type == "cpu" else GPU_MICRO_BATCH
    if isinstance(numerics.micro_batch, int):
        micro_batch = numerics.micro_batch
    half = torch.bfloat16 if numerics.precision == "bfloat16" else None
    graphs = Graphs(cuda_graphs if device.type == "cuda" else "off")
    return Compute(model, device, micro_batch, half, numerics.compile, numerics.winograd, graphs)
