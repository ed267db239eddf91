"""The partition as a picture: how many samples of each class each client owns."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.colors import LogNorm

from analysis import style
from analysis.load import Results
from analysis.outputs import Figure

WRITTEN_UP_TO = 20
"""Clients up to which each count is written into its square."""


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make a picture of the first seed's partition; other seeds have their own unless the job fixes it."""
    partitions = results.partitions
    if partitions.empty:
        return []
    first = partitions.iloc[0]
    same = (partitions["cell"] == first["cell"]) & (partitions["seed"] == first["seed"])
    counts = partitions[same].pivot_table(index="client_id", columns="class", values="num_samples", aggfunc="last")
    others = partitions["partition"].nunique() - 1
    said = [f"seed {first['seed']}{'' if not others else f'; {others} more partitions in these runs'}"]
    return [Figure(stem, title, partial(_draw, counts), [*said, *notes])]


def _draw(counts: pd.DataFrame) -> mpl_figure.Figure:
    clients, classes = counts.shape
    written = clients <= WRITTEN_UP_TO and classes <= 10
    drawn, (axis,) = style.figure(style.TEXT_WIDTH if written else 5.0, max(2.2, min(8.0, 1.2 + 0.22 * clients)))
    values = counts.to_numpy(dtype=float)
    shown = np.where(values > 0, values, np.nan)
    picture = axis.imshow(shown, aspect="auto", cmap="viridis", norm=LogNorm(1, max(2.0, float(values.max()))))
    if written:
        middle = np.sqrt(values.max())
        for (i, c), n in np.ndenumerate(values):
            if n:
                axis.text(
                    c, i, f"{n:.0f}", ha="center", va="center", fontsize=7, color="black" if n > middle else "white"
                )
    axis.set_xticks(range(classes), [str(c) for c in counts.columns])
    step = max(1, clients // 20)
    axis.set_yticks(range(0, clients, step), [str(c) for c in counts.index[::step]])
    axis.set_xlabel("class")
    axis.set_ylabel("client")
    axis.grid(visible=False)
    drawn.colorbar(picture, ax=axis, label="samples (blank: none)")
    return drawn
