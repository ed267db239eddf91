"""What a client owns: its shard D_i and its synthetic set S_i. Values; a step returns new ones."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import View
from qdsim.models import params as P
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
    on_gpu: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """The shard's bytes on a GPU that has worked with them: they stay there from step to step."""

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

    def resident(self, device: torch.device) -> Tensor:
        """Return the shard's bytes on a GPU (n, c, h, w)."""
        if device not in self.on_gpu:
            self.on_gpu[device] = torch.from_numpy(self.pool[self.indices]).to(device)
        return self.on_gpu[device]

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

    def batches(
        self, drawn: Iterable[np.ndarray], device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield :meth:`batch` of these positions, one after the other.

        On a GPU nothing is copied from batch to batch: all positions and labels go there at once, and the images are
        there already, a shard as bytes, a view of the synthetic set, which is small, as floats.
        """
        if device.type == "cpu":
            yield from (self.batch(chosen, device, dtype) for chosen in drawn)
            return
        m = len(self.synthetic)
        labels = self.client.labels[self.real]
        if m:
            assert self.client.synthetic is not None
            labels = np.concatenate([self.client.synthetic.labels[self.synthetic], labels])
            everything, _ = self.batch(np.arange(len(self)), torch.device("cpu"), dtype)
            images = everything.to(device)
        else:
            images = self.client.resident(device)
        normalized = normalizer(self.client.normalization, device, dtype)
        table = []
        for chosen in drawn:
            ordered = chosen[np.argsort(chosen >= m, kind="stable")]  # as in :meth:`batch`
            table += [torch.from_numpy(a) for a in (ordered if m else self.real[ordered], labels[ordered])]
        table = P.move(table, device)
        for rows, of_rows in zip(table[::2], table[1::2], strict=True):
            batch = images.index_select(0, rows)
            yield batch if m else normalized(batch), of_rows


def normalizer(normalization: Normalization, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return what turns bytes (n, c, h, w) into floats with zero mean and unit deviation per channel."""
    mean, std = (  # filled rather than copied: a copy would wait for a GPU
        torch.cat([torch.full((1, 1, 1), value, dtype=dtype, device=device) for value in values])
        for values in (normalization.mean, normalization.std)
    )
    return lambda batch: (batch.to(dtype) / 255 - mean) / std


def normalize(batch: Tensor, normalization: Normalization, dtype: torch.dtype) -> Tensor:
    """Turn one batch of bytes into floats."""
    return normalizer(normalization, batch.device, dtype)(batch)


def to_bytes(images: Tensor, normalization: Normalization) -> np.ndarray:
    """Undo :func:`normalize`; what learning has driven out of range is clipped."""
    mean = torch.tensor(normalization.mean, dtype=images.dtype)[:, None, None]
    std = torch.tensor(normalization.std, dtype=images.dtype)[:, None, None]
    return ((images.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy()
