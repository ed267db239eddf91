"""Accuracy against cost, all methods in one plot: what a method keeps, and how far it is from the oracle."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Figure


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make the figure where at least two methods can be compared."""
    outcomes, left_out = compare.paired(compare.outcomes(results))
    if outcomes.empty or outcomes["method"].nunique() < 2:
        return []
    outcomes, shown = by_method.first_of(outcomes, "cell", "asked")
    outcomes = outcomes.dropna(subset=["total.client_compute_s", "final.retain_accuracy"])
    oracle = outcomes[outcomes["method"] == compare.ORACLE][[*compare.SAME, "final.forget_accuracy"]]
    oracle = oracle.rename(columns={"final.forget_accuracy": "oracle"})
    outcomes = outcomes.merge(oracle, on=compare.SAME, how="left")
    outcomes["gap"] = (outcomes["final.forget_accuracy"] - outcomes["oracle"]).abs()
    if outcomes["method"].nunique() < 2:
        return []
    said = ["left and up is better on the left, left and down on the right", *shown, *left_out, *notes]
    return [Figure(stem, title, partial(_draw, outcomes), said)]


def _draw(outcomes: pd.DataFrame) -> mpl_figure.Figure:
    gaps = outcomes[outcomes["method"] != compare.ORACLE].dropna(subset="gap")
    panels = 2 if len(gaps) else 1
    drawn, axes = style.figure(style.COLUMN_WIDTH * panels, 3.0, 1, panels)
    _scatter(axes[0], outcomes, "final.retain_accuracy")
    axes[0].set_ylabel("R-Set accuracy (%)")
    if panels > 1:
        _scatter(axes[1], gaps, "gap")
        axes[1].set_ylabel("F-Set, points from Retrain-Or")
    for axis in axes:
        style.log_axis(axis, "x", "client compute until recovered (s)")
        style.as_percent(axis.yaxis)
        axis.margins(0.12)
    style.legend(drawn, axes)
    return drawn


def _scatter(axis: Axes, outcomes: pd.DataFrame, column: str) -> None:
    for method in style.method_order(outcomes["method"]):
        own = outcomes[outcomes["method"] == method]
        color, marker = style.method_style(method)
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
