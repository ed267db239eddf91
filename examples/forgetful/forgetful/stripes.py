"""A data set of one's own: stripes in four directions, with noise. Read yours from wherever it lies under ``root``."""

from pathlib import Path

import numpy as np

SIZE, TRAIN, TEST = 12, 480, 120


def stripes(root: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training images (uint8, n x channels x height x width) and labels, then the test set's."""
    return *_draw(TRAIN, seed=0), *_draw(TEST, seed=1)


def _draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 4
    y, x = np.mgrid[:SIZE, :SIZE]
    angles = labels * np.pi / 4
    waves = np.cos(angles)[:, None, None] * x + np.sin(angles)[:, None, None] * y
    shifted = np.sin(waves * 1.2 + rng.uniform(0, 2 * np.pi, (count, 1, 1)))
    noisy = 127 + 90 * shifted + rng.normal(0, 25, shifted.shape)
    return noisy.clip(0, 255).astype(np.uint8)[:, None], labels
