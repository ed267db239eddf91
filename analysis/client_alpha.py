"""§4.6: client-level unlearning as heterogeneity decreases."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.by_method import BEFORE, FINAL, SPEEDUP, TOTAL_S
from analysis.load import Results
from analysis.outputs import Figure, Table
from analysis.sweeps import with_swept

JOB = "client_alpha"
TITLE = "Client-level unlearning as heterogeneity decreases (§4.6)"
KEY = "partition.alpha"


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run."""
    made: list[Table | Figure] = []
    made += by_method.tables(results, JOB, TITLE, (*BEFORE, *FINAL, TOTAL_S, SPEEDUP))
    for stem, what, own in by_method.settings(results, JOB):
        outcomes, _ = compare.paired(compare.outcomes(own))
        swept, shown = with_swept(outcomes, KEY, method=None)
        notes = [*shown, *by_method.warnings(own)]
        made.append(Figure(stem, f"{TITLE} ({what})", partial(_draw, swept), notes))
    return made


def _draw(outcomes: pd.DataFrame) -> mpl_figure.Figure:
    drawn, axes = style.figure(style.TEXT_WIDTH, 2.6, 1, 2, sharey=True)
    for axis, score, label in zip(axes, compare.SCORES, ("F-Set", "R-Set"), strict=True):
        before = outcomes.groupby("swept")[f"before.{score}"].mean()
        axis.plot(before.index, before, color=style.TRAINING.color, ls=":", label="before")
        for method in style.method_order(outcomes["method"]):
            own = outcomes[outcomes["method"] == method].groupby("swept")[f"final.{score}"].agg(["mean", "std"])
            axis.errorbar(
                own.index,
                own["mean"],
                yerr=style.spread(own["std"]),
                color=style.method_style(method).color,
                marker=style.method_style(method).marker,
                label=style.method(method),
                capsize=2,
            )
        style.log_axis(axis, "x", "α (larger: more alike)")
        axis.set_title(label)
    style.percent_axis(axes[0], "accuracy after recovery")
    style.legend(drawn, axes)
    return drawn
