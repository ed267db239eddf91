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
TITLE_LETTERS = 32
"""What fits over a panel."""
Spans = list[tuple[str, float, float]]
"""Phases with where they begin and end."""


def make(results: Results) -> list[Figure]:
    """Make the figure for each setting that was run."""
    made = []
    for stem, what, own in by_method.settings(results, JOB):
        made += class_figure(own, stem, f"{TITLE} ({what})", by_method.warnings(own))
    return made


def class_figure(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Return a figure with a panel for each cell, request and method; none where no request was served yet."""
    classes = results.classes
    if not ((classes["method"] != "shared") & classes["phase"].isin(AFTER)).any():
        return []
    said = ["mean over seeds; a seed whose phase ended earlier counts on with its last value", *notes]
    return [Figure(stem, title, partial(_draw, classes), said)]


def timeline(classes: pd.DataFrame, phases: list[pd.DataFrame]) -> tuple[pd.DataFrame, Spans]:
    """Put phases one after the other: mean accuracy of each class over seeds, from the trained model at 0 on.

    ``classes`` has the training; each of ``phases`` the rows of one phase of one method and request.
    """
    train = classes[classes["phase"] == "train"]
    last = train.groupby(["run_id", "cell", "seed"], observed=True)["round"].transform("max")
    means = [train[train["round"] == last].groupby("class")["accuracy"].mean().to_frame(0).T]
    spans, at = [], 0
    for own in phases:
        wide = own.pivot_table(index="round", columns=["seed", "class"], values="accuracy", observed=True)
        wide = wide.reindex(range(1, int(own["round"].max()) + 1)).ffill()
        wide.index = wide.index + at
        means.append(wide.T.groupby(level="class").mean().T)
        spans.append((str(own["phase"].iloc[0]), float(at), float(at + len(wide))))
        at += len(wide)
    return pd.concat(means), spans


def shade(axes: Axes, spans: Spans) -> None:
    """Shade the phases: a round's work lies between its point and the one before."""
    for phase, begin, end in spans:
        axes.axvspan(begin, end, color=style.PHASE_SHADES[phase], alpha=0.6, lw=0, label=phase, zorder=0)


def plot_classes(axes: Axes, line: pd.DataFrame, thick: int | None = None) -> None:
    """Draw a line for each class, the forgotten one thicker."""
    for name, values in line.items():
        c = int(str(name))
        wide = 2.6 if c == thick else 1.1
        color, dashes = style.class_color(c), style.class_style(c)
        axes.plot(values.index, values, dashes, color=color, lw=wide, label=f"class {c}")


def _draw(classes: pd.DataFrame) -> mpl_figure.Figure:
    served = classes[(classes["method"] != "shared") & classes["phase"].isin(AFTER)]
    keys = ["cell", "asked", "method"]
    panels = list(dict.fromkeys(served[keys].astype(str).itertuples(index=False, name=None)))
    methods = style.method_order(m for _, _, m in panels)
    panels.sort(key=lambda panel: methods.index(panel[2]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width = max(style.COLUMN_WIDTH, 2.3 * columns + 0.9)
    lines = max(len(_cell_lines(cell)) for cell, _, _ in panels)
    drawn, axes = style.figure(width, (1.9 + 0.15 * lines) * rows + 0.7, rows, columns, sharey=True)
    for place, (cell, asked, method) in enumerate(panels):
        axis = axes[place]
        own = served[(served["cell"] == cell) & (served["asked"] == asked) & (served["method"] == method)]
        phases = [own[own["phase"] == phase] for phase in AFTER if (own["phase"] == phase).any()]
        line, spans = timeline(classes[classes["cell"] == cell], phases)
        shade(axis, spans)
        plot_classes(axis, line, thick=_forgotten(asked))
        axis.set_title("\n".join([f"{style.method(method)} · {asked}", *_cell_lines(cell)]))
        axis.set_xlabel("round after training")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if place % columns == 0:
            style.percent_axis(axis, "test accuracy")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    style.legend(drawn, axes)
    return drawn


def _cell_lines(cell: str) -> list[str]:
    """Write a point of a sweep over a panel: a line for each key, and none of them broken."""
    lines = [f"{key} = {value}" for key, value in by_method.cell_settings(cell)]
    return [line if len(line) <= TITLE_LETTERS else f"{line[: TITLE_LETTERS - 1]}…" for line in lines]


def _forgotten(asked: str) -> int | None:
    kind, _, target = asked.rpartition(":")
    return int(target) if kind.endswith("class") and target.isdigit() else None
