"""Synthetic images beside the real ones that they began as (table ``images``, see ``synthetic.gallery``)."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import style
from analysis.load import Results
from analysis.outputs import Figure
from qdsim.store.images import decode_image


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make the gallery of the first cell and seed, where the job asked for one."""
    images = results.images
    if images.empty:
        return []
    first = images.iloc[0]
    images = images[(images["cell"] == first["cell"]) & (images["seed"] == first["seed"])]
    said = [f"seed {first['seed']}", *notes]
    return [Figure(stem, title, partial(_draw, images), said, has_photographs=True)]


def _draw(images: pd.DataFrame) -> mpl_figure.Figure:
    classes = sorted(set(images["class"]))
    most = int(images.groupby("class").size().max())
    drawn, axes = style.figure(1.0 + 0.55 * len(classes), 0.5 + 1.15 * most, 2 * most, len(classes))
    for column, c in enumerate(classes):
        own = images[images["class"] == c].reset_index(drop=True)
        for k in range(most):
            for row, kind in enumerate(("real", "synthetic")):
                axis = axes[(2 * k + row) * len(classes) + column]
                axis.set_axis_off()
                if k < len(own) and pd.notna(own[kind][k]):
                    axis.imshow(_decode(own[kind][k]), cmap="gray", vmin=0, vmax=1)
                if k == 0 and row == 0:
                    axis.set_title(str(c))
                if column == 0:
                    axis.text(-0.15, 0.5, kind, transform=axis.transAxes, ha="right", va="center", fontsize=7)
    return drawn


def _decode(png: bytes) -> np.ndarray:
    """Return grey or colour as fractions: matplotlib's own reader has no limit of pixels."""
    picture = decode_image(png, formats=("PNG",))
    pixels = np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"), np.float32)
    return pixels / np.float32(255)
