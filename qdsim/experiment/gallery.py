"""A few synthetic images to look at, beside the real ones that they began as: the table ``images``."""

import io
from typing import Any

import numpy as np
from PIL import Image

from qdsim.federation.client_host import ImagePair
from qdsim.federation.evaluation import Pick


def picks(counts: np.ndarray, per_class: int) -> list[Pick]:
    """Choose images of each class, one from each of its largest owners in turn, until there are enough.

    ``counts`` are |S_i^c|, clients x classes; a class with fewer images gives all of them.
    """
    chosen: list[Pick] = []
    for c, owned in enumerate(counts.T):
        owners = sorted(np.flatnonzero(owned).tolist(), key=lambda i: (-int(owned[i]), i))
        turns = [(i, c, k) for k in range(int(owned.max())) for i in owners if k < owned[i]]
        chosen += turns[:per_class]
    return chosen


def rows(chosen: list[Pick], pairs: list[ImagePair]) -> list[dict[str, Any]]:
    """Return a row for each image."""
    return [
        {
            "client_id": i,
            "class": c,
            "synthetic": _png(pair.synthetic),
            "real": None if pair.real is None else _png(pair.real),
        }
        for (i, c, _), pair in zip(chosen, pairs, strict=True)
    ]


def _png(image: np.ndarray) -> bytes:
    """Encode bytes (c, h, w), grey or colour."""
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    return file.getvalue()
