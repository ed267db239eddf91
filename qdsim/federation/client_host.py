"""A host owns clients: their states live here and nowhere else. An actor holds one; so does ``inline``."""

import ctypes
import resource
import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from qdsim import seeds
from qdsim.algorithms import distillation
from qdsim.algorithms.phase import Assignment, ClientStep, ClientUpdate
from qdsim.algorithms.settings import Distillation
from qdsim.clocks import Stopwatch
from qdsim.data.clients import ClientState, SyntheticSet, to_bytes
from qdsim.data.datasets import Pixels
from qdsim.data.forgetting import Branch
from qdsim.federation import evaluation
from qdsim.federation.evaluation import Counts
from qdsim.models.compute import Compute
from qdsim.models.convnet import ConvNet
from qdsim.models.params import Params
from qdsim.store import arrays, storage
from qdsim.store.storage import Folder


@dataclass(frozen=True)
class Images:
    """The arrays of a data set as the hosts see them: one read-only copy per node."""

    train: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    pixels: Pixels


Pick = tuple[int, int, int]
"""Client, class, and which of the class's synthetic images."""
Shown = tuple[np.ndarray, np.ndarray | None]
"""A synthetic image and the real one it began as, uint8 (c, h, w); none where it began as noise."""


@dataclass(frozen=True)
class Shard:
    """Client i's rows of the training images, with their labels."""

    client_id: int
    indices: np.ndarray
    labels: np.ndarray


LEARNING = ("train", "finetune")
"""Phases in which synthetic sets change, in order."""
Keep = Folder | Literal["nowhere"] | None
"""Where a step writes the state that it changes: "nowhere" if no folder is seen by all nodes, None if it changes none.
"""
RESTART = "run without --resume to start anew"


def tag(phase: str, round_number: int) -> str:
    """Return the name of a client's state after a round; names sort as rounds follow each other."""
    return f"{LEARNING.index(phase)}-{round_number:05d}"


def state_path(folder: Folder, client_id: int, last: str) -> Folder:
    """Return the file of a client's state after a round."""
    return folder / f"{client_id}.{last}.npz"


def use_threads(threads: int) -> None:
    """Fix the number of torch threads: part of the configuration, because it moves bits."""
    torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step instead of handing each back to the kernel.

    A client step allocates the same tensors over and over. By default blocks of some megabytes go back at once, and
    every fresh page costs a fault: about a fifth of the time of a step at W = 32. Does nothing where there is no glibc.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**30)


def device_of(gpu_ids: list[str]) -> torch.device:
    """Return CUDA where the process was given a GPU and there really is one, else the CPU.

    Ray narrows CUDA_VISIBLE_DEVICES to the assigned GPU, which torch then calls cuda:0. Logical GPUs on a
    machine without any leave the CPU.
    """
    if not gpu_ids or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # the memory statistics do not do so by themselves
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    return torch.device("cuda:0")


def limit_memory(device: torch.device, share: float) -> None:
    """Keep a process to its share of a GPU's memory: Ray divides GPUs by their names only.

    What torch allocates is limited, not the context that CUDA makes for each process.
    """
    if device.type == "cuda" and 0 < share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)


class ClientHost:
    """Keeps client states between rounds and runs client steps on them."""

    def __init__(self, compute: Compute, images: Images, node_id: str = "", gpu_id: str = ""):
        self._compute = compute
        self._images = images
        self._node_id, self._gpu_id = node_id, gpu_id
        self._clients: dict[int, ClientState] = {}

    def adopt(self, model: ConvNet, run_seed: int, shards: list[Shard], synthetic: Distillation | None) -> None:
        """Take clients over as they are before training; forget all earlier ones."""
        self._compute = replace(self._compute, model=model)
        self._clients = {}
        for shard in shards:
            pool, pixels = self._images.train, self._images.pixels
            client = ClientState(shard.client_id, pool, pixels, shard.indices, shard.labels)
            if synthetic is not None:
                pick = seeds.generator(run_seed, "synthetic-init", client_id=shard.client_id)
                client = replace(client, synthetic=distillation.initial_set(client, synthetic, pick))
            self._clients[shard.client_id] = client

    def warm_up(self) -> None:
        """Do what the first step would have to wait for."""
        self._compute.warm_up()

    def step(
        self, client_step: ClientStep, params: Params, client_id: int, names: Assignment, keep: Keep = None
    ) -> ClientUpdate:
        """Run one client step; the state changes only if the step returns.

        The new state is written into the folder ``keep``, where one is given, before anybody hears of the step.
        """
        cuda = self._compute.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._compute.device)
        began_s = time.perf_counter()
        watch = Stopwatch(self._compute.device)
        with watch:
            state, update = client_step(self._clients[client_id], params, names=names, compute=self._compute)
        self._clients[client_id] = state
        if keep is not None and keep != "nowhere":
            self._keep(keep, state, names)
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
        return evaluation.count_correct(self._compute, params, images.test, images.pixels, rows, labels)

    def own_counts(self, params: Params, client_ids: list[int], branch: Branch) -> tuple[Counts, Counts]:
        """Count on the clients' own data, forget set and rest; samples stay where they are."""
        classes = self._compute.model.num_classes
        forgotten, retained = Counts.none(classes), Counts.none(classes)
        for client_id in client_ids:
            f, r = evaluation.client_counts(self._compute, params, self._clients[client_id], branch)
            forgotten, retained = forgotten + f, retained + r
        return forgotten, retained

    def test_features(self, params: Params, rows: np.ndarray) -> np.ndarray:
        """Return what an attack sees of these test samples."""
        images = self._images
        labels = images.test_labels[rows]
        return evaluation.features(self._compute, params, images.test, images.pixels, rows, labels)

    def own_features(self, params: Params, positions: dict[int, np.ndarray]) -> np.ndarray:
        """Return what an attack sees of clients' own samples, client by client; the samples stay."""
        found = [np.empty((0, len(evaluation.FEATURES)))]
        for client_id, chosen in positions.items():
            client = self._clients[client_id]
            rows, labels = client.indices[chosen], client.labels[chosen]
            found.append(evaluation.features(self._compute, params, client.pool, client.pixels, rows, labels))
        return np.concatenate(found)

    def save_clients(self, folder: Folder) -> None:
        """Write each client's synthetic set into a file of its own; nothing where the node does not see the folder."""
        if not self.sees(folder):
            return
        for client_id, client in self._clients.items():
            if client.synthetic is not None:
                arrays.write(folder / f"{client_id}.npz", client.synthetic.to_arrays())

    def _keep(self, folder: Folder, client: ClientState, names: Assignment) -> None:
        """Write a client's state after a round.

        Of the older ones two stay: a round is committed once it has been looked at, and the next one begins before.
        """
        assert client.synthetic is not None
        older = storage.inside(folder, f"{client.client_id}.*.npz")
        path = state_path(folder, client.client_id, tag(names.phase, names.round_number))
        arrays.write(path, client.synthetic.to_arrays())
        for file in [file for file in older if file.name < path.name][:-2]:
            file.unlink(missing_ok=True)

    def restore(self, folder: Folder, reached: dict[int, str]) -> None:
        """Take clients' states as they were written at a tag; who is not in ``reached`` has written none."""
        for client_id, last in reached.items():
            client = self._clients[client_id]
            stored = SyntheticSet.from_arrays(arrays.read(state_path(folder, client_id, last), RESTART))
            self._clients[client_id] = replace(client, synthetic=stored)

    def sees(self, folder: Folder) -> bool:
        """Tell whether this node sees a folder: storage may not be shared."""
        return folder.is_dir()

    def load_clients(self, folder: Folder, fix: str) -> None:
        """Read the synthetic sets that :meth:`save_clients` wrote."""
        for client_id, client in self._clients.items():
            if client.synthetic is not None:
                stored = SyntheticSet.from_arrays(arrays.read(folder / f"{client_id}.npz", fix))
                self._clients[client_id] = replace(client, synthetic=stored)

    def gallery(self, picks: list[Pick], init: str) -> list[Shown]:
        """Return synthetic images as bytes, each with the real sample it began as, for the user who asked for them."""
        shown: list[Shown] = []
        for client_id, label, k in picks:
            client = self._clients[client_id]
            assert client.synthetic is not None
            row = np.flatnonzero(client.synthetic.labels == label)[k]
            synthetic = to_bytes(client.synthetic.images[row : row + 1], client.pixels)[0]
            real = client.pool[client.indices[client.synthetic.origin[row]]] if init == "real" else None
            shown.append((synthetic, real))
        return shown

    def storage_bytes(self) -> int:
        """Return what the clients store for unlearning beside their data."""
        sets = [client.synthetic for client in self._clients.values()]
        return sum(synthetic.size_bytes for synthetic in sets if synthetic is not None)
