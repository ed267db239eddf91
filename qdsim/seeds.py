"""Every random draw comes from a generator that is seeded by names.

The names are (run seed, purpose, request, phase, round, client): never the run's id, a method's place
in the plan, the order in which clients finish or the actor they run on. A step that is done again
therefore draws the same numbers.
"""

import hashlib

import numpy as np
import torch


def seed_of(
    run_seed: int,
    purpose: str,
    *,
    request: str = "",
    phase: str = "",
    round_number: int = 0,
    client_id: int = -1,
) -> int:
    """Hash the names to 63 bits."""
    names = repr((run_seed, purpose, request, phase, round_number, client_id))
    return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big") >> 1


def generator(run_seed: int, purpose: str, **names: str | int) -> torch.Generator:
    """Return a CPU generator for these names; ``names`` as in :func:`seed_of`."""
    return torch.Generator().manual_seed(seed_of(run_seed, purpose, **names))  # type: ignore[arg-type]


def numpy_generator(run_seed: int, purpose: str, **names: str | int) -> np.random.Generator:
    """Return a numpy generator for these names; ``names`` as in :func:`seed_of`."""
    return np.random.default_rng(seed_of(run_seed, purpose, **names))  # type: ignore[arg-type]
