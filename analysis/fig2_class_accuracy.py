"""Figure 2: accuracy of each class through unlearning and recovery; for any run, a panel for each method."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis import by_method, style
from analysis.load import Results
from analysis.outputs import Figure

JOB = "fig2_class_accuracy"
TITLE = "Figure 2: accuracy of each class"
AFTER = ("unlearn", "recover", "relearn")


def make(results: Results) -> list[Figure]:
    """Make the figure for each setting that was run."""
    made = []
    for stem, what, runs in by_method.settings(results, JOB):
        classes = results.classes[results.classes["run_id"].isin(runs["run_id"])]
        notes = ["mean over seeds", *by_method.warnings(results, runs)]
        made.append(class_figure(stem, f"{TITLE} ({what})", classes, notes))
    return made


def class_figure(stem: str, title: str, classes: pd.DataFrame, notes: list[str]) -> Figure:
    """Return a figure with a panel for each cell, request and method."""
    return Figure(stem, title, partial(_draw, classes), notes)


def timeline(rows: pd.DataFrame, before: pd.DataFrame) -> tuple[pd.DataFrame, list[tuple[str, float, float]]]:
    """Put the phases of one method and request one after the other: ``x`` 0 is the trained model.

    Returns the rows with ``x``, and each phase with where it begins and ends.
    """
    spans, parts, at = [], [before.assign(x=0)], 0
    for phase in AFTER:
        own = rows[rows["phase"] == phase]
        if own.empty:
            continue
        last = int(own["round"].max())
        parts.append(own.assign(x=at + own["round"]))
        spans.append((phase, float(at), float(at + last)))
        at += last
    return pd.concat(parts), spans


def shade(axes: Axes, spans: list[tuple[str, float, float]]) -> None:
    """Shade the phases: a round's work lies between its point and the one before."""
    for phase, begin, end in spans:
        axes.axvspan(begin, end, color=style.PHASE_SHADES[phase], alpha=0.6, lw=0, label=phase, zorder=0)


def trained(classes: pd.DataFrame) -> pd.DataFrame:
    """Return the last round of training."""
    train = classes[classes["phase"] == "train"]
    last = train.groupby(["run_id", "cell", "seed"], observed=True)["round"].transform("max")
    return train[train["round"] == last]


def _draw(classes: pd.DataFrame) -> mpl_figure.Figure:
    served = classes[(classes["method"] != "shared") & classes["phase"].isin(AFTER)]
    # a request drawn for each seed is one panel; of several seeds' clients the mean says little, but is the mean
    panels = [
        (cell, asked, method)
        for cell in dict.fromkeys(served["cell"])
        for asked in dict.fromkeys(served["asked"])
        for method in style.method_order(served["method"])
        if ((served["cell"] == cell) & (served["asked"] == asked) & (served["method"] == method)).any()
    ]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    drawn, axes = style.figure(
        max(style.COLUMN_WIDTH, 2.3 * columns + 0.9), 1.9 * rows + 0.7, rows, columns, sharey=True
    )
    for place, (cell, asked, method) in enumerate(panels):
        axis = axes[place]
        same = (served["cell"] == cell) & (served["asked"] == asked) & (served["method"] == method)
        line, spans = timeline(served[same], trained(classes[classes["cell"] == cell]))
        shade(axis, spans)
        means = line.groupby(["class", "x"], observed=True)["accuracy"].mean()
        target = _forgotten(str(asked))
        for c in sorted(set(line["class"])):
            own = means[c]
            wide = 2.6 if c == target else 1.1
            axis.plot(own.index, own, style.class_style(c), color=style.class_color(c), lw=wide, label=f"class {c}")
        axis.set_title(" · ".join(filter(None, (style.method(method), str(asked), str(cell)))))
        axis.set_xlabel("round after training")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if place % columns == 0:
            style.percent_axis(axis, "test accuracy")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    style.legend(drawn, axes)
    return drawn


def _forgotten(asked: str) -> int | None:
    kind, _, target = asked.rpartition(":")
    return int(target) if kind.endswith("class") and target.isdigit() else None
