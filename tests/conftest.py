"""Toy clients, and the Ray cluster that all tests of a process share."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# Ray reads these when it is imported: set them before anything imports it
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ.pop("RAY_ADDRESS", None)
os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}  # of the object store that tests start

from qdsim.algorithms.phase import RoundContext
from qdsim.data.clients import ClientState
from qdsim.data.datasets import Normalization
from qdsim.models.compute import Compute
from qdsim.models.convnet import ConvNet

PROJECT = Path(__file__).parent.parent
LONGEST = (
    "ray_engine/test_three_hosts",
    "ray_engine/test_executor",
    "ray_engine/test_faults",
    "analysis/test_report",
    "store/test_storage",
    "experiment/test_crash",
    "api/test_notebook",
    "test_outside",
    "cluster/test_slurm",
)
CTX = RoundContext(run_seed=0, request="", phase="train", round_number=1)


def make_client(client_id: int, labels: list[int], *, size: int = 8, seed: int = 0) -> ClientState:
    """Return a client with random grey images of the given labels."""
    rng = np.random.default_rng([seed, client_id])
    pool = rng.integers(0, 256, (len(labels), 1, size, size), dtype=np.uint8)
    array = np.asarray(labels, dtype=np.int64)
    return ClientState(client_id, pool, Normalization((0.5,), (0.25,)), np.arange(len(labels)), array)


def make_compute(num_classes: int = 3, *, width: int = 4, size: int = 8, micro_batch: int = 32) -> Compute:
    """Return a small network of two blocks, computed on the CPU."""
    model = ConvNet(channels=1, size=size, num_classes=num_classes, width=width, depth=2)
    return Compute(model, torch.device("cpu"), micro_batch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first: of two processes none is then left alone with the last of them."""
    place = {f"tests/{name}.py": i for i, name in enumerate(LONGEST)}
    assert all((PROJECT / file).exists() for file in place), "a file that takes minutes has moved"
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster_address() -> Iterator[str]:
    """One head node with two CPUs and two logical GPUs, for all tests; of several processes each has its own."""
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    yield cluster.address
    cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def real_data_root() -> str:
    """Where MNIST and CIFAR-10 lie, or skip: a user has neither at hand."""
    root = os.environ.get("QDSIM_DATA_ROOT")
    if not root:
        pytest.skip("QDSIM_DATA_ROOT is not set: no real MNIST and CIFAR-10 at hand")
    return root
