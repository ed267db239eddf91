"""What a client owns: its shard D_i and its synthetic set S_i. Values; a step returns new ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import View
from qdsim.models.params import Arrays


@dataclass(frozen=True)
class SyntheticSet:
    """S_i: learned images with fixed labels, and what learning them has to remember."""

    images: Tensor
    """Normalised float images (m, c, h, w)."""
    labels: np.ndarray
    """int64 (m,), sorted by class."""
    velocity: Tensor
    """Momentum of the normalization' SGD, as ``images``; it persists over rounds."""
    origin: np.ndarray
    """int64 (m,): position in the shard of the real sample that each image began as."""
    extra: np.ndarray
    """int64 (m,): position in the shard of the real sample that stands beside it in recovery."""

    @property
    def size_bytes(self) -> int:
        """What the client stores for unlearning: its images as floats, the chosen real samples as bytes."""
        return self.images.numel() * (self.images.element_size() + 1)

    def to_arrays(self) -> Arrays:
        """Return plain arrays, to be stored by the client's owner."""
        tensors = {"images": self.images.numpy(), "velocity": self.velocity.numpy()}
        return {**tensors, "labels": self.labels, "origin": self.origin, "extra": self.extra}

    @staticmethod
    def from_arrays(arrays: Arrays) -> "SyntheticSet":
        """Return what :meth:`to_arrays` was given."""
        images, velocity = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["velocity"])
        return SyntheticSet(images, arrays["labels"], velocity, arrays["origin"], arrays["extra"])


@dataclass(frozen=True)
class ClientState:
    """Client i. ``pool`` is the node's one copy of the training images; the shard is a view of it."""

    client_id: int
    pool: np.ndarray
    """uint8 (all samples, c, h, w), shared and read-only."""
    normalization: Normalization
    indices: np.ndarray
    """int64 (n,): the shard's rows in ``pool``."""
    labels: np.ndarray
    """int64 (n,)."""
    synthetic: SyntheticSet | None = None

    def samples(self, view: View) -> "Samples":
        """Return Z_i."""
        if view.source == "real":
            rows = np.flatnonzero(view.mask(self.client_id, self.labels))
            return Samples(self, rows, np.empty(0, np.int64))
        if self.synthetic is None:
            raise ValueError(f"client {self.client_id} has no synthetic set: train with distillation first")
        chosen = np.flatnonzero(view.mask(self.client_id, self.synthetic.labels))
        real = self.synthetic.extra[chosen] if view.source == "augmented" else np.empty(0, np.int64)
        return Samples(self, real, chosen)

    def normalized(self, positions: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return real images of the shard, as floats, made on the device for this batch alone."""
        batch = torch.from_numpy(self.pool[self.indices[positions]]).to(device)
        return normalize(batch, self.normalization, dtype)


@dataclass(frozen=True)
class Samples:
    """Z_i as positions of real samples in the shard and of images in the synthetic set."""

    client: ClientState
    real: np.ndarray
    synthetic: np.ndarray

    def __len__(self) -> int:
        """|Z_i|."""
        return len(self.real) + len(self.synthetic)

    def batch(self, chosen: np.ndarray, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return images (b, c, h, w) and labels (b,), synthetic ones first."""
        m = len(self.synthetic)
        images, labels = [], []
        if m:
            synthetic = self.client.synthetic
            assert synthetic is not None
            rows = self.synthetic[chosen[chosen < m]]
            images.append(synthetic.images[torch.from_numpy(rows)].to(device, dtype))
            labels.append(synthetic.labels[rows])
        if len(self.real):
            rows = self.real[chosen[chosen >= m] - m]
            images.append(self.client.normalized(rows, device, dtype))
            labels.append(self.client.labels[rows])
        return torch.cat(images), torch.from_numpy(np.concatenate(labels)).to(device)


def normalize(batch: Tensor, normalization: Normalization, dtype: torch.dtype) -> Tensor:
    """Turn bytes (n, c, h, w) into floats with zero mean and unit deviation per channel."""
    mean = torch.tensor(normalization.mean, dtype=dtype, device=batch.device)[:, None, None]
    std = torch.tensor(normalization.std, dtype=dtype, device=batch.device)[:, None, None]
    return (batch.to(dtype) / 255 - mean) / std


def to_bytes(images: Tensor, normalization: Normalization) -> np.ndarray:
    """Undo :func:`normalize`; what learning has driven out of range is clipped."""
    mean = torch.tensor(normalization.mean, dtype=images.dtype)[:, None, None]
    std = torch.tensor(normalization.std, dtype=images.dtype)[:, None, None]
    return ((images.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy()
