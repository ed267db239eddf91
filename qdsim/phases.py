"""The vocabulary between algorithms and federation: what a round is told, does and returns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from qdsim import derivatives, seeds, winograd
from qdsim.clients import ClientState
from qdsim.forgetting import View
from qdsim.hyper import Numerics, Stage
from qdsim.models import ConvNet
from qdsim.params import Params
from qdsim.stopping import SETTLED, Rule

CPU_MICRO_BATCH = 32
WHOLE_BATCH = 2**31

Forward = Callable[[ConvNet, Params, Tensor, bool, torch.dtype | None, derivatives.Tiled | None], derivatives.Pass]
Backward = Callable[[derivatives.Pass, Tensor], derivatives.Returned]


@cache
def passes(compiled: bool) -> tuple[Forward, Backward]:
    """Return the network's way forwards and its way back, as they are or compiled.

    Compiled, what lies between two convolutions is one kernel that passes over memory once.
    """
    if not compiled:
        return derivatives.forward, derivatives.backward
    return torch.compile(derivatives.forward), torch.compile(derivatives.backward)


@dataclass(frozen=True)
class Compute:
    """What a process computes with; the same for every client step it runs."""

    model: ConvNet
    device: torch.device
    micro_batch: int
    """Gradients are summed over pieces of this many samples. Part of the configuration: it moves bits."""
    half: torch.dtype | None = None
    """What convolutions are computed in, if not in float32."""
    compiled: bool = False
    """On a CPU whole micro-batches are compiled, and no other: each size would take its own half a minute."""
    winograd: Literal["matching", "always", "never"] = "matching"
    """Where wide convolutions on a CPU are done by :mod:`qdsim.winograd`, and the first block by :mod:`qdsim.patches`;
    such passes are not compiled."""

    def tiled(self, params: Params, matching: bool = False) -> derivatives.Tiled | None:
        """Return θ's filters transformed, where passes are to use them: once for all batches at this θ."""
        asked = self.winograd == "always" or (matching and self.winograd == "matching")
        if not asked or self.half is not None or not winograd.pays(self.model.width, self.device):
            return None
        return derivatives.transformed(self.model, params)

    def forward(self, params: Params, images: Tensor, tiled: derivatives.Tiled | None = None) -> derivatives.Pass:
        """Run the network, with a way back."""
        return self._passes(len(images), bool(tiled))[0](self.model, params, images, True, self.half, tiled)

    def backward(self, done: derivatives.Pass, g: Tensor) -> derivatives.Returned:
        """Go back from ∂L/∂logits."""
        return self._passes(len(g), bool(done.tiled))[1](done, g)

    def _passes(self, size: int, tiled: bool) -> tuple[Forward, Backward]:
        fits = self.device.type != "cpu" or size == self.micro_batch
        return passes(self.compiled and fits and not tiled)

    def warm_up(self) -> None:
        """Compile what will be needed, or find it in the compiler's cache."""
        if self.compiled and self.device.type == "cpu":
            params = self.model.init(torch.Generator())
            done = self.forward(params, torch.zeros(self.micro_batch, self.model.channels, *2 * [self.model.size]))
            self.backward(done, torch.zeros_like(done.logits))


def make_compute(model: ConvNet, device: torch.device, numerics: Numerics) -> Compute:
    """Return what a process computes with; a micro-batch of ``auto`` is 32 on the CPU, where the cache is short."""
    micro_batch = CPU_MICRO_BATCH if device.type == "cpu" else WHOLE_BATCH
    if isinstance(numerics.micro_batch, int):
        micro_batch = numerics.micro_batch
    half = torch.bfloat16 if numerics.precision == "bfloat16" else None
    return Compute(model, device, micro_batch, half, numerics.compile, numerics.winograd)


@dataclass(frozen=True)
class Assignment:
    """The names of a round. With a client's number they seed every draw of its step."""

    run_seed: int
    request: str
    phase: str
    round_number: int

    def generator(self, purpose: str, client_id: int = -1) -> torch.Generator:
        """Return the generator for a purpose in this round."""
        return seeds.generator(
            self.run_seed,
            purpose,
            request=self.request,
            phase=self.phase,
            round_number=self.round_number,
            client_id=client_id,
        )


@dataclass
class ClientUpdate:
    """All that leaves a client after a step. Neither samples nor synthetic images are in it."""

    client_id: int
    num_samples: int
    """|Z_i|, the client's weight."""
    delta: Params
    """θ_i - θ; in FU-MP's pruning round the client's activation statistics; empty where there is nothing to send."""
    loss: float
    """Mean loss over the step's mini-batches."""
    gradients: int
    """Mini-batch gradients with respect to θ on the phase's own data (matching is not counted)."""
    samples: int
    """Samples that went into those gradients."""
    first_loss: float | None = None
    """Loss of the first of them: what the round's model was worth to the client, before it moved."""
    bytes_up: int = 0
    step_s: float = 0.0
    """Wall-clock time of the step where it ran."""
    matching_s: float = 0.0
    compute_s: float = 0.0
    peak_memory_bytes: int = 0
    node_id: str = ""
    gpu_id: str = ""


ClientStep = Callable[..., tuple[ClientState, ClientUpdate]]
"""``client_step(client, params, names=..., compute=...)``: values in, values out."""

ServerStep = Callable[..., Params]
"""``server_step(params, updates, names)``; updates arrive in the order of client numbers."""

Select = Callable[[np.ndarray, Assignment], list[int]]
"""``select(sizes, names)``: the participants of a round, in order, from the |Z_i|."""

Updates = Iterable[ClientUpdate]


@dataclass(frozen=True)
class Phase:
    """A number of rounds of ``client_step`` then ``server_step`` on one view of the data."""

    name: str
    """``train``, ``finetune``, ``unlearn``, ``recover`` or ``relearn``."""
    stage: Stage
    view: View
    select: Select
    client_step: ClientStep
    server_step: ServerStep
    start: Literal["current", "initial", "fresh"] = "current"
    """Begin from the current parameters, from training's θ_0, or from new random ones."""
    learns: bool = False
    """Its client step changes the client's own state: the synthetic set."""
    rule: Rule | None = None
    """What ends the phase early where its stage is to stop by convergence; None: nothing does."""

    @property
    def ends_by(self) -> Rule | None:
        """The rule that its stage asks for; None: only its rounds end it."""
        if self.stage.stop == "loss":
            return SETTLED
        return self.rule if self.stage.stop == "converged" else None
