"""Accuracy against cost, all methods in one plot: what a method keeps, and how far it is from the oracle."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes

from analysis import compare, style
from analysis.load import Results
from analysis.outputs import Figure


def make(results: Results, stem: str, title: str, runs: list[str], notes: list[str]) -> list[Figure]:
    """Make the figure where at least two methods can be compared."""
    outcomes, left_out = compare.paired(compare.outcomes(results, runs=runs))
    if outcomes.empty or outcomes["method"].nunique() < 2:
        return []
    same = compare.SAME
    oracle = outcomes[outcomes["method"] == compare.ORACLE].set_index(same)["final.forget_accuracy"]
    outcomes = outcomes.join(oracle.rename("oracle"), on=same)
    outcomes["gap"] = (outcomes["final.forget_accuracy"] - outcomes["oracle"]).abs()
    said = ["left and up is better on the left, left and down on the right", *left_out, *notes]
    return [Figure(stem, title, partial(_draw, outcomes), said)]


def _draw(outcomes: pd.DataFrame) -> mpl_figure.Figure:
    drawn, (left, right) = style.figure(style.TEXT_WIDTH, 3.0, 1, 2)
    _scatter(left, outcomes, "final.retain_accuracy")
    left.set_ylabel("R-Set accuracy (%)")
    _scatter(right, outcomes[outcomes["method"] != compare.ORACLE], "gap")
    right.set_ylabel("F-Set, points from Retrain-Or")
    for axis in (left, right):
        style.log_axis(axis, "x", "client compute until recovered (s)")
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}")
        axis.margins(0.12)
    style.legend(drawn, [left])
    return drawn


def _scatter(axis: Axes, outcomes: pd.DataFrame, column: str) -> None:
    for method in style.method_order(outcomes["method"]):
        own = outcomes[outcomes["method"] == method]
        color, marker = style.METHOD_COLORS.get(method), style.METHOD_MARKERS.get(method, "o")
        axis.scatter(own["total.client_compute_s"], own[column], s=12, color=color, marker=marker, alpha=0.4, lw=0)
        mean = own[["total.client_compute_s", column]].mean()
        label = style.method(method)
        axis.scatter(
            [mean.iloc[0]],
            [mean.iloc[1]],
            s=52,
            color=color,
            marker=marker,
            edgecolor="white",
            lw=0.8,
            label=label,
            zorder=3,
        )
