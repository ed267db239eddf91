"""What a request takes away, and which samples Z a phase works on (§2.2, §3.1)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class ForgetSet:
    """D_f by description: whole classes at every client, and whole clients."""

    classes: frozenset[int] = frozenset()
    clients: frozenset[int] = frozenset()

    def __or__(self, other: "ForgetSet") -> "ForgetSet":
        """Unite two forget sets: what a sequence of requests has taken away so far."""
        return ForgetSet(self.classes | other.classes, self.clients | other.clients)

    def covers(self, client_id: int, labels: np.ndarray) -> np.ndarray:
        """Tell for each sample of a client whether it is in the forget set; bool (n,)."""
        if client_id in self.clients:
            return np.ones(len(labels), dtype=bool)
        return np.isin(labels, list(self.classes))


NOTHING = ForgetSet()


@dataclass(frozen=True)
class View:
    """Z: the samples that a phase uses, by description, so that client and driver agree on it."""

    source: Literal["real", "synthetic", "augmented"]
    """D, S, or S with one real sample beside each synthetic one."""
    only: ForgetSet | None = None
    """Keep nothing but these."""
    without: ForgetSet = field(default=NOTHING)
    """Leave these out."""

    def mask(self, client_id: int, labels: np.ndarray) -> np.ndarray:
        """Tell which of a client's samples belong to Z_i; bool (n,)."""
        kept = ~self.without.covers(client_id, labels)
        return kept if self.only is None else kept & self.only.covers(client_id, labels)

    def sizes(self, real: np.ndarray, synthetic: np.ndarray) -> np.ndarray:
        """Return |Z_i| for every client from the counts |D_i^c| and |S_i^c|, both (clients, classes)."""
        counts = {"real": real, "synthetic": synthetic, "augmented": 2 * synthetic}[self.source]
        classes = np.arange(counts.shape[1])
        return np.array([int(row[self.mask(i, classes)].sum()) for i, row in enumerate(counts)])


@dataclass(frozen=True)
class UnlearningRequest:
    """One request to serve: its name in the tables, what it forgets, and what was forgotten before."""

    label: str
    """``class:9``; in a sequence with its position, ``2:class:8``; empty in training."""
    forget: ForgetSet
    previously_forgotten: ForgetSet = NOTHING

    @property
    def forgotten(self) -> ForgetSet:
        """All that must stay out of recovery."""
        return self.previously_forgotten | self.forget
