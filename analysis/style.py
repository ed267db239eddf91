"""How figures and tables look: one colour per method everywhere, safe for the colour-blind, readable in a paper."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from qdsim.algorithms.methods import METHODS as DECLARED


class MethodStyle(NamedTuple):
    """How a method looks in every figure."""

    color: str | None
    """None: the next one of matplotlib's own."""
    marker: str


METHODS = {
    "retrain": MethodStyle("#000000", "s"),
    "federaser": MethodStyle("#E69F00", "^"),
    "s2u": MethodStyle("#CC79A7", "v"),
    "sga": MethodStyle("#56B4E9", "D"),
    "fump": MethodStyle("#009E73", "P"),
    "quickdrop": MethodStyle("#D55E00", "o"),
}
"""In the order of the paper's tables, in Okabe and Ito's palette."""
TRAINING = MethodStyle("#555555", ".")
"""Of the training that all methods share."""
ANY_METHOD = MethodStyle(None, "o")
"""Of one that is not known here."""
CLASS_COLORS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#888888",
)  # fmt: skip
"""Tol's muted palette, for classes."""
CLASS_STYLES = ("-", "--", "-.", ":")
PHASE_SHADES = {"unlearn": "#BBDDF5", "recover": "#FBE7A1", "relearn": "#CFE8CF", "finetune": "#E4D4EC"}
"""Blue for unlearning and yellow for recovery, as in the paper's Figure 4."""
PHASES = ("train", "finetune", "unlearn", "recover", "relearn")
DATASETS = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "svhn+extra": "SVHN with extra",
}
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,  # real fonts: publishers refuse Type 3
    "font.family": "DejaVu Sans",
}
TEXT_WIDTH = 7.0
COLUMN_WIDTH = 3.5
"""Inches, of a two-column paper."""
MOST_MARKERS, MARKERS_APART = 12, 0.08
"""Points from which on markers are thinned out, and how far apart they are then, in diagonals of the panel."""
NARROW = 0.7
"""Decades below which 1, 2 and 5 may leave an axis with a single number."""


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure of its own, outside pyplot's global state, with its axes in reading order."""
    with mpl.rc_context(RC):
        made = Figure(figsize=(width, height), layout="constrained")
        axes = made.subplots(rows, columns, squeeze=False, **options)
    return made, list(axes.flat)


def log_axis(axes: Axes, which: str, label: str) -> None:
    """Make an axis logarithmic, with plain numbers as its labels and never two on each other."""
    axes.set(**{f"{which}scale": "log"})
    axis: Axis = getattr(axes, f"{which}axis")
    decades = _decades(axis)
    if decades < NARROW:
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.5 else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value:.0e}")
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(label)


def _decades(axis: Axis) -> float:
    least, most = axis.get_minpos(), axis.get_data_interval()[1]
    return math.log10(most / least) if 0 < least < most < math.inf else 0.0


def legend(drawn: Figure, axes: Iterable[Axes]) -> None:
    """Put one legend under the figure, as wide as it may be: every name that occurs in any panel once, phases first."""
    columns = max(2, int(drawn.get_figwidth() / 1.15))
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    named = {label: named[label] for label in (*(p for p in PHASES if p in named), *named)}
    if named:
        drawn.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(columns, len(named)))


def markers(points: int) -> float | None:
    """Return which points of a curve have a marker: of a long one, those that are some way apart in the picture."""
    return MARKERS_APART if points > MOST_MARKERS else None


def as_percent(axis: Axis) -> None:
    """Label fractions as percentages, with the digits that the ticks need: steps of 2.5 are not 2 and 3."""
    axis.set_major_formatter(lambda value, _: f"{round(100 * value, 3) + 0.0:g}")


def spread(deviations: pd.Series) -> pd.Series | None:
    """Return standard deviations as error bars; none where every one is of a single seed."""
    return deviations if deviations.notna().any() else None


def percent_axis(axes: Axes, label: str) -> None:
    """Show fractions as percentages from 0 to 100."""
    axes.set_ylim(-0.02, 1.02)
    as_percent(axes.yaxis)
    axes.set_ylabel(f"{label} (%)")


def method_order(methods: Iterable[str]) -> list[str]:
    """Sort methods as the paper's tables do, unknown ones last."""
    names = list(METHODS)
    return sorted(set(methods), key=lambda m: (names.index(m) if m in names else len(names), m))


def method(name: object) -> str:
    """Return a method's name as the paper writes it."""
    declared = DECLARED.get(str(name))
    return declared.title if declared else str(name)


def method_style(name: str) -> MethodStyle:
    """Return how a method looks."""
    return TRAINING if name == "shared" else METHODS.get(name, ANY_METHOD)


def class_color(c: int) -> str:
    """Return a class's colour; beyond ten they come again with another line."""
    return CLASS_COLORS[c % len(CLASS_COLORS)]


def class_style(c: int) -> str:
    """Return a class's line."""
    return CLASS_STYLES[c // len(CLASS_COLORS) % len(CLASS_STYLES)]


def dataset(name: str) -> str:
    """Return a data set's name as it is written."""
    return DATASETS.get(name, name)
