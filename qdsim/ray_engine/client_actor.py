"""The client actor. It imports what client steps need, and no reader of data sets, table writer or checker of jobs."""

import time

import numpy as np
import ray

from qdsim.algorithms.phase import Assignment, ClientStep, ClientUpdate
from qdsim.algorithms.settings import Distillation
from qdsim.data.datasets import Pixels
from qdsim.data.forgetting import Branch
from qdsim.federation.chaos import Fault
from qdsim.federation.client_host import (
    ClientHost,
    Images,
    Keep,
    Pick,
    Shard,
    Shown,
    device_of,
    keep_freed_memory,
    limit_memory,
    use_threads,
)
from qdsim.federation.evaluation import Counts
from qdsim.models import params as P
from qdsim.models.compute import make_compute
from qdsim.models.convnet import ConvNet
from qdsim.models.numerics import Numerics
from qdsim.models.params import Packed
from qdsim.store.storage import Folder


@ray.remote
class ClientActor:
    """Owns one or more clients. Their shards and synthetic sets never leave it."""

    def __init__(
        self,
        train: np.ndarray,
        test: np.ndarray,
        test_labels: np.ndarray,
        pixels: Pixels,
        model: ConvNet,
        numerics: Numerics,
        gpu_share: float,
    ):
        use_threads(numerics.threads)
        keep_freed_memory()
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids()["GPU"]
        device = device_of(gpu_ids)
        limit_memory(device, gpu_share)
        self._node_id, self._gpu_id, self._device = context.get_node_id(), ",".join(gpu_ids), device.type
        compute = make_compute(model, device, numerics)
        self._host = ClientHost(compute, Images(train, test, test_labels, pixels), self._node_id, self._gpu_id)

    def describe(self) -> tuple[str, str, str]:
        """Return node, GPU and kind of device."""
        return self._node_id, self._gpu_id, self._device

    def adopt(self, model: ConvNet, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Take clients over."""
        self._host.adopt(model, run_seed, shards, synthetic)

    def warm_up(self) -> None:
        """Compile, or find what another actor of this node has compiled."""
        self._host.warm_up()

    @ray.method(num_returns=2)
    def step(
        self,
        packed: Packed,
        client_step: ClientStep,
        client_id: int,
        names: Assignment,
        keep: Keep,
        fault: Fault | None,
    ) -> tuple[ClientUpdate, Packed]:
        """Run a client step; the delta is an object of its own, which waits in the store for its turn."""
        if fault is not None:
            fault.strike()
        update = self._host.step(client_step, P.unpack(packed), client_id, names, keep)
        delta, update.delta = P.pack(update.delta), {}
        return update, delta

    def test_counts(self, packed: Packed, start: int, stop: int) -> tuple[Counts, float]:
        """Count on a range of the test set; say how long it took."""
        began_s = time.perf_counter()
        return self._host.test_counts(P.unpack(packed), start, stop), time.perf_counter() - began_s

    def own_counts(self, packed: Packed, client_ids: list[int], branch: Branch) -> tuple[tuple[Counts, Counts], float]:
        """Count on clients' own data; say how long it took."""
        began_s = time.perf_counter()
        return self._host.own_counts(P.unpack(packed), client_ids, branch), time.perf_counter() - began_s

    def test_features(self, packed: Packed, rows: np.ndarray) -> np.ndarray:
        """Look at test samples."""
        return self._host.test_features(P.unpack(packed), rows)

    def own_features(self, packed: Packed, positions: dict[int, np.ndarray]) -> np.ndarray:
        """Look at clients' own samples."""
        return self._host.own_features(P.unpack(packed), positions)

    def save_clients(self, folder: Folder) -> None:
        """Write the clients' synthetic sets."""
        self._host.save_clients(folder)

    def sees(self, folder: Folder) -> bool:
        """Tell whether this node sees a folder."""
        return self._host.sees(folder)

    def load_clients(self, folder: Folder, fix: str) -> None:
        """Read the clients' synthetic sets."""
        self._host.load_clients(folder, fix)

    def restore(self, folder: Folder, reached: dict[int, str]) -> None:
        """Take the clients' states as they were after a round."""
        self._host.restore(folder, reached)

    def gallery(self, picks: list[Pick], init: str) -> list[Shown]:
        """Return the images that the user asked for."""
        return self._host.gallery(picks, init)

    def storage_bytes(self) -> int:
        """Return what the clients store."""
        return self._host.storage_bytes()
