"""Where Ray is started or joined, and how clients are laid out on it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import AuthenticationError

from qdsim.errors import CannotPlace, CannotReach
from qdsim.ray_environment import how_to_authenticate
from qdsim.sections import ClusterSection

ACTOR_BYTES = 400 * 2**20
"""What an actor with torch takes before it holds anything: 330 MB were measured, the rest is slack."""
MEMORY_SHARE = 0.7
"""Of a node's memory that actors may take when clients are packed automatically."""
TOKEN_CPU = 0.01
MOST_ACTORS_PER_GPU = 8
"""Automatic packing: each process on a GPU costs 300 to 400 MB of it before any tensor."""


@dataclass(frozen=True)
class Node:
    """What one node of the cluster offers."""

    node_id: str
    cpus: float
    gpus: int
    memory_bytes: float


@dataclass(frozen=True)
class Layout:
    """Which clients share an actor, and what each actor asks of its node."""

    clients: tuple[tuple[int, ...], ...]
    gpus: float
    cpus: float

    @property
    def bundle(self) -> dict[str, float]:
        """Return one actor's resources, as Ray names them."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def lay_out(clients: int, wanted: ClusterSection, nodes: list[Node]) -> Layout:
    """Divide clients into actors and choose each actor's share of a node.

    A fraction of a GPU never straddles two of them, so floor(1/f) actors fit each GPU.
    """
    gpus = sum(node.gpus for node in nodes)
    if isinstance(wanted.clients_per_actor, int):
        per_actor = wanted.clients_per_actor
    else:
        most = max(1, sum(int(MEMORY_SHARE * node.memory_bytes // ACTOR_BYTES) for node in nodes))
        if wanted.gpus_per_client == "auto" and gpus:
            most = min(most, gpus * MOST_ACTORS_PER_GPU)
        elif isinstance(wanted.gpus_per_client, float) and wanted.gpus_per_client > 0:
            most = min(most, max(1, gpus * _per_gpu(wanted.gpus_per_client)))
        per_actor = -(-clients // min(clients, most))
    groups = tuple(tuple(range(i, min(i + per_actor, clients))) for i in range(0, clients, per_actor))
    if wanted.gpus_per_client == "auto":
        fraction = 1 / -(-len(groups) // gpus) if gpus else 0.0
    else:
        fraction = float(wanted.gpus_per_client)
    fits = gpus * _per_gpu(fraction) if fraction else len(groups)
    if fits < len(groups):
        need = f"{len(groups)} actors of {fraction:g} GPU"
        found = f"{gpus} GPUs on {len(nodes)} nodes, which hold {fits}"
        packed = f", or cluster.clients_per_actor to {-(-clients // fits)}" if fits else ""
        # rounded down to what Ray counts: 1/6 rounded up would fit five times, not six
        smaller = 10_000 // -(-len(groups) // gpus) / 10_000 if gpus else 0
        raise CannotPlace(need, found, f"set cluster.gpus_per_client to {smaller:g}{packed}")
    # where GPUs decide who sits where, CPUs must not: the node with the GPUs may have few of them
    cpus = TOKEN_CPU if fraction else min(1.0, 0.5 * sum(node.cpus for node in nodes) / len(groups))
    return Layout(groups, fraction, max(TOKEN_CPU, int(cpus * 100) / 100))


def _per_gpu(fraction: float) -> int:
    """Return how many actors of a fraction fit one GPU; the slack is for fractions such as 1/99."""
    return int(1 / fraction + 1e-6)


def nodes() -> list[Node]:
    """Return the nodes of the cluster that are alive."""
    found = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            has = node["Resources"]
            memory = has.get("memory", 0.0)
            cpus, gpus = has.get("CPU", 0.0), int(has.get("GPU", 0))
            found.append(Node(node["NodeID"], cpus, gpus, memory))
    return found


def free() -> dict[str, float]:
    """Return the CPUs and GPUs that nobody holds at the moment."""
    return {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}  # type: ignore[no-untyped-call]


@contextmanager
def connected(wanted: ClusterSection, address: str | None) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on this machine for the duration of the block."""
    if address is None and not os.environ.get("RAY_ADDRESS"):
        ray.init(
            address="local",
            num_cpus=wanted.local_cpus,
            num_gpus=wanted.local_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="qdsim",
        )
    else:
        where = address or os.environ["RAY_ADDRESS"]
        try:
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, namespace="qdsim")
        except AuthenticationError as error:
            raise CannotReach(where, error.message, how_to_authenticate()) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            fix = f"see that it runs there; if it does, its token may be another: {how_to_authenticate()}"
            raise CannotReach(where, str(error).splitlines()[0], fix) from None
    try:
        yield
    finally:
        ray.shutdown()
