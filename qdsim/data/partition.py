"""Who holds which training sample: IID and class-major Dirichlet(α) splits (§4.1)."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qdsim import seeds
from qdsim.errors import BadInput

MAX_REDRAWS = 1_000
OFFICIAL_SEED = 42

Shares = list[list[np.ndarray]]
"""Samples by class, then by client."""


@dataclass(frozen=True)
class Partition:
    """One split: ``indices[i]`` are the training samples of client i, sorted by class."""

    indices: tuple[np.ndarray, ...]
    counts: np.ndarray
    """|D_i^c|, int64 (clients, classes)."""

    @property
    def sha256(self) -> str:
        """Hash of the split; runs are comparable only where it is equal."""
        digest = hashlib.sha256()
        for rows in self.indices:
            digest.update(len(rows).to_bytes(8, "big") + rows.astype("<i8").tobytes())
        return digest.hexdigest()

    def synthetic_counts(self, scale: int) -> np.ndarray:
        """|S_i^c| = ceil(|D_i^c| / s): at least one where the class exists (Algorithm 2, line 4)."""
        return -(-self.counts // scale)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return each client's samples, to be stored."""
        return {f"client_{i}": rows for i, rows in enumerate(self.indices)}


def split(
    labels: np.ndarray,
    num_classes: int,
    *,
    kind: str,
    clients: int,
    alpha: float,
    seed: int,
    min_size: int,
) -> Partition:
    """Divide the samples; draw again until every client has ``min_size`` of them."""
    if clients * max(min_size, 1) > len(labels):
        most = len(labels) // max(min_size, 1)
        allowed = f"{len(labels)} samples allow at most {most} clients of {max(min_size, 1)}"
        raise BadInput("partition.clients", clients, allowed)
    by_class = [np.flatnonzero(labels == c) for c in range(num_classes)]
    if kind == "iid":
        return _gather(_iid(by_class, clients, seed), labels, num_classes)
    draw = (_official if kind == "official" else _dirichlet)(by_class, clients, alpha, seed)
    best = 0
    for _ in range(MAX_REDRAWS):
        shares = draw()
        smallest = min(sum(len(part[i]) for part in shares) for i in range(clients))
        if smallest >= min_size:
            return _gather(shares, labels, num_classes)
        best = max(best, smallest)
    fix = f"the smallest client reached {best} samples in {MAX_REDRAWS} draws; lower it, or raise partition.alpha"
    raise BadInput("partition.min_size", min_size, fix)


def _iid(by_class: list[np.ndarray], clients: int, seed: int) -> Shares:
    """Deal each shuffled class out evenly; the start rotates so that sizes differ by one at most."""
    rng = seeds.numpy_generator(seed, "partition")
    shares, start = [], 0
    for rows in by_class:
        rows = rng.permutation(rows)
        shares.append([np.sort(rows[(i - start) % clients :: clients]) for i in range(clients)])
        start = (start + len(rows)) % clients
    return shares


def _dirichlet(by_class: list[np.ndarray], clients: int, alpha: float, seed: int) -> Callable[[], Shares]:
    """For each class draw q ~ Dir(α 1_N) and cut its shuffled samples at the cumulative shares."""
    rng = seeds.numpy_generator(seed, "partition")

    def draw() -> Shares:
        shares = []
        for rows in by_class:
            q = rng.dirichlet([alpha] * clients)
            cuts = (np.cumsum(q)[:-1] * len(rows)).astype(int)
            shares.append([np.sort(part) for part in np.split(rng.permutation(rows), cuts)])
        return shares

    return draw


def _official(by_class: list[np.ndarray], clients: int, alpha: float, seed: int) -> Callable[[], Shares]:
    """As the paper's code: numpy's legacy generator, one call for all classes, no shuffle."""
    rng = np.random.RandomState(seed)

    def draw() -> Shares:
        q = rng.dirichlet([alpha] * clients, size=len(by_class))
        return [np.split(rows, (np.cumsum(q[c])[:-1] * len(rows)).astype(int)) for c, rows in enumerate(by_class)]

    return draw


def _gather(shares: Shares, labels: np.ndarray, num_classes: int) -> Partition:
    clients = len(shares[0])
    indices = tuple(np.concatenate([part[i] for part in shares]) for i in range(clients))
    counts = np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in indices])
    return Partition(indices, counts.astype(np.int64))
