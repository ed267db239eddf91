"""Learning curves: training by rounds, then each method's R-Set and F-Set accuracy against what it has cost."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.ticker import MaxNLocator

from analysis import by_method, style
from analysis.load import Results
from analysis.outputs import Figure

AFTER = ("unlearn", "recover", "relearn")


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make the figure of these runs, finished or not."""
    rounds = results.rounds
    if rounds.empty:
        return []
    # one cell and one request: more lines than that cannot be told apart
    served = rounds[rounds["phase"].isin(AFTER) & (rounds["method"] != "shared")]
    served, shown = by_method.first_of(served, "cell", "asked")
    train = rounds[rounds["phase"] == "train"]
    free = ["a line begins at its first round with a cost"] if (served["client_compute_s"] == 0).any() else []
    return [Figure(stem, title, partial(_draw, train, served), ["each seed a line", *free, *shown, *notes])]


def _draw(train: pd.DataFrame, served: pd.DataFrame) -> mpl_figure.Figure:
    drawn, (left, middle, right) = style.figure(style.TEXT_WIDTH + 2, 2.7, 1, 3)
    cells = list(dict.fromkeys(train["cell"]))
    for (cell, _), own in train.groupby(["cell", "seed"], observed=True):
        shade = 0.35 + 0.65 * (cells.index(cell) + 1) / len(cells)
        own = own.sort_values("round")
        left.plot(own["round"], own["test_accuracy"], color=style.TRAINING.color, alpha=shade, lw=1)
    left.set_title("training")
    left.set_xlabel("round")
    left.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    style.percent_axis(left, "test accuracy")
    for axis, score, label in (
        (middle, "retain_accuracy", "R-Set accuracy"),
        (right, "forget_accuracy", "F-Set accuracy"),
    ):
        for method in style.method_order(served["method"]):
            for i, (_, own) in enumerate(served[served["method"] == method].groupby("seed")):
                order = own["phase"].map({phase: k for k, phase in enumerate(AFTER)}).astype(int)
                own = own.assign(order=order).sort_values(["order", "round"])
                name = style.method(method) if i == 0 else None
                cost = own["client_compute_s"].cumsum()
                cost = cost.where(cost > 0)  # FedEraser's first round costs no client anything: off a logarithmic axis
                marker = style.method_style(method).marker
                axis.plot(
                    cost,
                    own[score],
                    color=style.method_style(method).color,
                    marker=marker,
                    markevery=style.markers(len(cost)),
                    ms=3.5,
                    lw=1,
                    label=name,
                    alpha=0.9,
                )
        if len(served):
            style.log_axis(axis, "x", "client compute since the request (s)")
        axis.set_title("unlearn, recover, relearn")
        style.percent_axis(axis, label)
    style.legend(drawn, [middle])
    return drawn
