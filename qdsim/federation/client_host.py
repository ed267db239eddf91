"""A host owns clients: their states live here and nowhere else. An actor holds one; so does ``inline``."""

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from qdsim import seeds
from qdsim.algorithms import distillation
from qdsim.algorithms.phase import ClientStep, ClientUpdate, RoundContext
from qdsim.algorithms.settings import Distillation
from qdsim.clocks import Stopwatch
from qdsim.data.clients import ClientState, SyntheticSet, to_bytes
from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import UnlearningRequest
from qdsim.federation import measures
from qdsim.federation.client_states import StateFolder, state_file, tag, trained_file, written_states
from qdsim.federation.measures import Counts
from qdsim.models.compute import Compute
from qdsim.models.model import Model
from qdsim.models.params import Params
from qdsim.store import arrays
from qdsim.store.arrays import ArrayFile
from qdsim.store.storage import StoragePath

KEPT_STATES = 2
"""Older states of a client that stay: a round is committed once it is evaluated, and the next one begins before."""


@dataclass(frozen=True)
class Images:
    """The arrays of a data set as the hosts see them: one read-only copy per node."""

    train: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    normalization: Normalization


@dataclass(frozen=True)
class Shard:
    """Client i's rows of the training images, with their labels."""

    client_id: int
    indices: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class ImagePair:
    """A synthetic image and the real one it began as, uint8 (c, h, w); no real one where it began as noise."""

    synthetic: np.ndarray
    real: np.ndarray | None


class ClientHost:
    """Keeps client states between rounds and runs client steps on them."""

    def __init__(
        self,
        compute: Compute,
        images: Images,
        client_ids: tuple[int, ...] | None = None,
        node_id: str = "",
        gpu_id: str = "",
    ):
        self._compute = compute
        self._images = images
        self._client_ids = client_ids
        """The clients that it may own; None: all."""
        self._node_id, self._gpu_id = node_id, gpu_id
        self._clients: dict[int, ClientState] = {}

    def assign_clients(self, model: Model, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Take over its own among a federation's clients, as they are before training; drop all earlier ones."""
        self._compute = replace(self._compute, model=model)
        self._clients = {}
        for shard in shards:
            if self._client_ids is not None and shard.client_id not in self._client_ids:
                continue
            pool, normalization = self._images.train, self._images.normalization
            client = ClientState(shard.client_id, pool, normalization, shard.indices, shard.labels)
            if synthetic is not None:
                pick = seeds.generator(run_seed, "synthetic-init", client_id=shard.client_id)
                client = replace(client, synthetic=distillation.initial_set(client, synthetic, pick))
            self._clients[shard.client_id] = client

    def warm_up(self) -> None:
        """Do what the first step would have to wait for."""
        self._compute.gradients.warm_up()

    def step(
        self,
        params: Params,
        client_step: ClientStep,
        client_id: int,
        ctx: RoundContext,
        save_to: StateFolder | None = None,
    ) -> ClientUpdate:
        """Run one client step; the state changes only if the step returns.

        The new state is written into the folder ``save_to``, where one is given, before the update is returned.
        """
        cuda = self._compute.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._compute.device)
        began_s = time.perf_counter()
        watch = Stopwatch(self._compute.device)
        with watch:
            state, update = client_step(self._clients[client_id], params, ctx=ctx, compute=self._compute)
        self._clients[client_id] = state
        if save_to is not None:
            saved_s = time.perf_counter()
            self._save_state(save_to, state, ctx)
            update.saving_s = time.perf_counter() - saved_s
        update.compute_s, update.step_s = watch.seconds, time.perf_counter() - began_s
        update.node_id, update.gpu_id = self._node_id, self._gpu_id
        # Linux reports the process's peak in KiB; on a GPU the allocator's peak is the figure of interest
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        update.peak_memory_bytes = torch.cuda.max_memory_allocated(self._compute.device) if cuda else resident
        return update

    def test_counts(self, params: Params, start: int, stop: int) -> Counts:
        """Count on rows ``start`` to ``stop`` of the test set."""
        rows = np.arange(start, stop)
        images = self._images
        labels = images.test_labels[start:stop]
        return measures.count_correct(self._compute, params, images.test, images.normalization, rows, labels)

    def client_counts(
        self, params: Params, client_ids: tuple[int, ...] | None, request: UnlearningRequest
    ) -> tuple[Counts, Counts]:
        """Count on the data of its clients among ``client_ids`` (None: all): the forget set, and the rest."""
        classes = self._compute.model.num_classes
        forgotten, retained = Counts.none(classes), Counts.none(classes)
        for client_id, client in self._clients.items():
            if client_ids is None or client_id in client_ids:
                f, r = measures.client_counts(self._compute, params, client, request)
                forgotten, retained = forgotten + f, retained + r
        return forgotten, retained

    def test_features(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Return what an attack sees of these test samples."""
        images = self._images
        labels = images.test_labels[rows]
        return measures.features(self._compute, params, images.test, images.normalization, rows, labels)

    def client_features(self, params: Params, client_id: int, positions: np.ndarray) -> np.ndarray:
        """Return what an attack sees of a client's own samples; the samples stay."""
        client = self._clients[client_id]
        rows, labels = client.indices[positions], client.labels[positions]
        return measures.features(self._compute, params, client.pool, client.normalization, rows, labels)

    def can_access(self, folder: StoragePath) -> bool:
        """Tell whether this node can access a folder: storage may not be shared."""
        return folder.is_dir()

    def save_states(self, folder: StateFolder) -> None:
        """Write each client's synthetic set into a file of its own; nothing where the folder cannot be accessed."""
        if not self.can_access(folder.path):
            return
        for client_id, client in self._clients.items():
            if client.synthetic is not None:
                arrays.write(trained_file(folder, client_id), client.synthetic.to_arrays())

    def _save_state(self, folder: StateFolder, client: ClientState, ctx: RoundContext) -> None:
        """Write a client's state after a round; of the older ones :data:`KEPT_STATES` stay."""
        assert client.synthetic is not None
        older = written_states(folder, client.client_id)
        written = state_file(folder, client.client_id, tag(ctx.phase, ctx.round_number))
        arrays.write(written, client.synthetic.to_arrays())
        for file in [file for file in older if file.name < written.path.name][:-KEPT_STATES]:
            file.unlink(missing_ok=True)

    def load_states(self, files: Mapping[int, ArrayFile], fix: str) -> None:
        """Read the synthetic sets of its clients from these files; ``fix`` is said of a damaged one."""
        for client_id, client in self._clients.items():
            if client_id in files and client.synthetic is not None:
                stored = SyntheticSet.from_arrays(arrays.read(files[client_id], fix))
                self._clients[client_id] = replace(client, synthetic=stored)

    def image_pair(self, client_id: int, label: int, k: int, init: str) -> ImagePair:
        """Return the k-th synthetic image of a class as bytes, with the real sample it began as."""
        client = self._clients[client_id]
        assert client.synthetic is not None
        row = np.flatnonzero(client.synthetic.labels == label)[k]
        synthetic = to_bytes(client.synthetic.images[row : row + 1], client.normalization)[0]
        real = client.pool[client.indices[client.synthetic.origin[row]]] if init == "real" else None
        return ImagePair(synthetic, real)

    def storage_bytes(self) -> int:
        """Return what the clients store for unlearning beside their data."""
        sets = [client.synthetic for client in self._clients.values()]
        return sum(synthetic.size_bytes for synthetic in sets if synthetic is not None)
