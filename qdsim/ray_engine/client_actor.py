"""The client actor. It imports what client steps need, and no reader of data sets, table writer or checker of jobs."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import torch

from qdsim.algorithms.phase import ClientUpdate
from qdsim.data.datasets import Normalization
from qdsim.errors import CannotPlace, UnusableGpu
from qdsim.federation.chaos import Fault
from qdsim.federation.client_host import ClientHost, Images
from qdsim.models import params as P
from qdsim.models.compute import Compute, make_compute
from qdsim.models.device import DeviceInfo, describe, granted_device, limit_memory, set_up
from qdsim.models.fast import fused
from qdsim.models.fast.cuda import Fused
from qdsim.models.model import Model
from qdsim.models.numerics import Numerics
from qdsim.models.params import PackedParams


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor runs."""

    node_id: str
    gpu_id: str
    device: DeviceInfo
    instead_of: str = ""
    """The GPU that it was granted, where it computes on the CPU."""
    why: str = ""
    notes: tuple[str, ...] = ()
    """What its user should know of its GPU: that kernels are missing, for example."""

    @property
    def on_gpu(self) -> bool:
        """Tell whether it computes on a GPU; one that it was granted may have been replaced by the CPU."""
        return self.device.model != "cpu"


def _warmed_up(compute: Compute, granted: str) -> list[str]:
    """Have a GPU do once what its first step would wait for; say what it has to do without."""
    try:
        compute.gradients.warm_up()
    except RuntimeError as error:
        raise UnusableGpu(granted, (str(error) or type(error).__name__).splitlines()[0]) from None
    if not isinstance(compute.gradients, Fused):
        return []
    compute.gradients.try_out(compute.graphs)
    found = []
    if not fused.version():
        found.append(f"GPU {granted} computes without Triton's kernels, more slowly: {fused.why_without()}")
    if compute.graphs.why_not:
        found.append(f"GPU {granted} computes without CUDA graphs (cluster.cuda_graphs): {compute.graphs.why_not}")
    return found


@ray.remote
class ClientActor:
    """Owns one or more clients. Their shards and synthetic sets never leave it."""

    def __init__(
        self,
        train: np.ndarray,
        test: np.ndarray,
        test_labels: np.ndarray,
        normalization: Normalization,
        model: Model,
        numerics: Numerics,
        cuda_graphs: Literal["off", "auto", "on"],
        client_ids: tuple[int, ...],
        gpu_share: float,
        cpu_fallback: bool,
    ):
        set_up(numerics)
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids()["GPU"]
        granted = ",".join(gpu_ids)
        self._unusable: CannotPlace | None = None
        compute = make_compute(model, torch.device("cpu"), numerics)
        notes, reason = [], ""
        try:
            device, reason = granted_device(gpu_ids)
            if reason and not cpu_fallback:
                raise UnusableGpu(granted, reason)
            limit_memory(device, gpu_share)
            if device.type == "cuda":
                compute = make_compute(model, device, numerics, cuda_graphs)
                notes += _warmed_up(compute, granted)
        except CannotPlace as error:
            # told when it is asked for its place: of an actor that ends here Ray would tell a traceback
            self._unusable = error
        on_gpu = compute.device.type == "cuda"
        info = describe(compute.device, fused.version())
        on, instead_of = (granted, "") if on_gpu else ("", granted)
        self._place = ActorPlace(context.get_node_id(), on, info, instead_of, reason, tuple(notes))
        images = Images(train, test, test_labels, normalization)
        self._host = ClientHost(compute, images, client_ids, self._place.node_id, self._place.gpu_id)

    def place(self) -> ActorPlace:
        """Return where it runs, once it has started; raise where it was granted a GPU that it cannot use."""
        if self._unusable is not None:
            raise self._unusable
        return self._place

    def call(self, method: str, packed: PackedParams | None, *arguments: Any) -> tuple[Any, float]:
        """Call a public method of the host; return its result and how long it took."""
        if method.startswith("_"):
            raise ValueError(f"{method} is no public method of a host")
        began_s = time.perf_counter()
        params = () if packed is None else (P.unpack(packed),)
        found = getattr(self._host, method)(*params, *arguments)
        return found, time.perf_counter() - began_s

    @ray.method(num_returns=2)
    def step(
        self, fault: Fault | None, packed: PackedParams, *arguments: Any
    ) -> tuple[tuple[ClientUpdate, float], PackedParams]:
        """Run a client step; return the update with its time, and the delta, which waits in the store for its turn."""
        if fault is not None:
            fault.strike()
        update = self._host.step(P.unpack(packed), *arguments)
        delta, update.delta = P.pack(update.delta), {}
        return (update, update.step_s), delta
