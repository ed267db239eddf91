"""What a host measures of a model on samples that it holds: correct answers per class, and what an attack sees.

Counts add up exactly, whoever made them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qdsim.data.clients import ClientState, normalizer
from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.models import params as P
from qdsim.models.compute import Compute
from qdsim.models.numerics import GPU_MICRO_BATCH
from qdsim.models.params import Params

BATCH = 100
"""Images of one forward pass. Pieces begin at multiples of it, so a result never depends on who did which."""

GPU_BATCH = 1000
"""The same on a GPU, whose memory holds it: a multiple of :data:`BATCH`."""

AT_ONCE = 10 * GPU_BATCH
"""Images that are copied to a GPU at once: each copy waits for it."""


@dataclass(frozen=True)
class Counts:
    """Correct answers and samples of each class, both int64 (num_classes,)."""

    correct: np.ndarray
    total: np.ndarray

    def __add__(self, other: "Counts") -> "Counts":
        """Pool two sets of samples."""
        return Counts(self.correct + other.correct, self.total + other.total)

    def accuracy(self, classes: set[int] | frozenset[int] | None = None) -> float | None:
        """Return the accuracy pooled over the samples of these classes (all of them by default)."""
        kept = np.arange(len(self.total)) if classes is None else np.array(sorted(classes), dtype=int)
        total = int(self.total[kept].sum())
        return int(self.correct[kept].sum()) / total if total else None

    @staticmethod
    def none(num_classes: int) -> "Counts":
        """Return the counts of no samples."""
        return Counts(np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64))


FEATURES = ("loss", "entropy")
"""What membership inference sees of a sample: its loss -log p_y, and the entropy of the softmax."""


def batch_of(compute: Compute) -> int:
    """Return how many images go through the network at once: few on a CPU, or where a job has small micro-batches."""
    roomy = compute.device.type == "cuda" and compute.micro_batch >= GPU_MICRO_BATCH
    return GPU_BATCH if roomy else BATCH


@torch.no_grad()
def _logits(
    compute: Compute, params: Params, pool: np.ndarray, normalization: Normalization, rows: np.ndarray
) -> Iterator[Tensor]:
    """Yield the logits of batches, in order, where they were computed."""
    theta = P.to(params, compute.device)
    normalized = normalizer(normalization, compute.device, next(iter(theta.values())).dtype)
    at_once = BATCH if compute.device.type == "cpu" else AT_ONCE
    batch = batch_of(compute)
    for start in range(0, len(rows), at_once):
        images = torch.from_numpy(pool[rows[start : start + at_once]]).to(compute.device)
        for piece in torch.split(images, batch):
            yield compute.gradients.logits(theta, normalized(piece))


def count_correct(
    compute: Compute,
    params: Params,
    pool: np.ndarray,
    normalization: Normalization,
    rows: np.ndarray,
    labels: np.ndarray,
) -> Counts:
    """Count correct answers on ``pool[rows]``, whose labels are ``labels``."""
    classes = compute.model.num_classes
    guessed = [logits.argmax(1) for logits in _logits(compute, params, pool, normalization, rows)]
    guesses = torch.cat([torch.empty(0, dtype=torch.int64), *P.move(guessed, torch.device("cpu"))]).numpy()
    right = guesses == labels
    return Counts(np.bincount(labels[right], minlength=classes), np.bincount(labels, minlength=classes))


def features(
    compute: Compute,
    params: Params,
    pool: np.ndarray,
    normalization: Normalization,
    rows: np.ndarray,
    labels: np.ndarray,
) -> np.ndarray:
    """Return :data:`FEATURES` of ``pool[rows]``, float64 (n, 2)."""
    found = np.empty((len(rows), len(FEATURES)))
    answers = P.move(list(_logits(compute, params, pool, normalization, rows)), torch.device("cpu"))
    start = 0
    for logits in answers:
        piece = slice(start, start + len(logits))
        start += len(logits)
        log_p = torch.log_softmax(logits.to(torch.float64), dim=1)
        of_label = log_p.gather(1, torch.from_numpy(labels[piece])[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(1)
        found[piece] = torch.stack([-of_label, entropy], dim=1).numpy()
    return found


def client_counts(
    compute: Compute, params: Params, client: ClientState, request: UnlearningRequest
) -> tuple[Counts, Counts]:
    """Count on a client's own data: its part of the forget set, and what no request has taken away."""
    forgotten = View("real", only=request.forget, without=request.previously_forgotten)
    halves = []
    for view in (forgotten, View("real", without=request.forgotten)):
        mask = view.mask(client.client_id, client.labels)
        rows, labels = client.indices[mask], client.labels[mask]
        halves.append(count_correct(compute, params, client.pool, client.normalization, rows, labels))
    return halves[0], halves[1]
