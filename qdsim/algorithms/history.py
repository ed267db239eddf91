"""What the server remembers of training: the length of every update, and the first round's updates whole.

FedEraser's calibration keeps the direction of a fresh update and the length of the stored one, so the lengths are
all that it needs; its first round at client level applies the stored updates as they are. Every round is recorded
in every training, whatever methods follow: a few floats per update.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from qdsim.models import params as P
from qdsim.models.params import Arrays, Params

NORM_BYTES = 8


@dataclass(frozen=True)
class UpdateNorms:
    """One client's update in one round."""

    num_samples: int
    norms: dict[str, float]
    """||U|| of each tensor."""


@dataclass
class History:
    """Rounds of training, each with its participants."""

    rounds: dict[int, dict[int, UpdateNorms]] = field(default_factory=dict)
    first: dict[int, Params] = field(default_factory=dict)
    """The updates of round 1, whole."""

    def record(self, round_number: int, client_id: int, num_samples: int, delta: Params) -> None:
        """Take an update's lengths, and the update itself in the first round."""
        lengths = {n: float(torch.linalg.vector_norm(t, dtype=torch.float64)) for n, t in delta.items()}
        self.rounds.setdefault(round_number, {})[client_id] = UpdateNorms(num_samples, lengths)
        if round_number == 1:
            self.first[client_id] = P.clone(delta)

    def until(self, round_number: int) -> "History":
        """Return what was recorded up to a round: the next one may be under way."""
        return History({number: own for number, own in self.rounds.items() if number <= round_number}, self.first)

    def storage_bytes(self, rounds: list[int], *, whole_first: bool) -> tuple[int, int]:
        """Return what is kept of these rounds, and what keeping every update whole would take."""
        kept = nominal = 0
        update_bytes = P.size_bytes(next(iter(self.first.values())))
        for number in rounds:
            for recorded in self.rounds[number].values():
                kept += NORM_BYTES * len(recorded.norms)
                nominal += update_bytes
        return kept + (update_bytes * len(self.first) if whole_first else 0), nominal

    def to_arrays(self) -> Arrays:
        """Return plain arrays, to be stored."""
        rows = [(number, i, r) for number, clients in self.rounds.items() for i, r in clients.items()]
        names = list(rows[0][2].norms)
        arrays: Arrays = {
            "names": np.array(names),
            "rounds": np.array([number for number, _, _ in rows]),
            "clients": np.array([i for _, i, _ in rows]),
            "num_samples": np.array([r.num_samples for _, _, r in rows]),
            "norms": np.array([[r.norms[n] for n in names] for _, _, r in rows]),
        }
        for i, delta in self.first.items():
            arrays |= {f"first/{i}/{name}": array for name, array in P.to_numpy(delta).items()}
        return arrays

    @staticmethod
    def from_arrays(arrays: Arrays) -> "History":
        """Return what :meth:`to_arrays` was given."""
        history = History()
        names = [str(name) for name in arrays["names"]]
        columns = (arrays[name] for name in ("rounds", "clients", "num_samples", "norms"))
        for number, i, size, norms in zip(*columns, strict=True):
            recorded = UpdateNorms(int(size), dict(zip(names, map(float, norms), strict=True)))
            history.rounds.setdefault(int(number), {})[int(i)] = recorded
        for key in arrays:
            if key.startswith("first/"):
                _, client, name = key.split("/")
                history.first.setdefault(int(client), {})[name] = torch.from_numpy(np.array(arrays[key]))
        return history
