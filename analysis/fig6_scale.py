"""Figure 6: scale parameter s against R-Set accuracy, and against the time of unlearning and recovery."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Figure, Table
from analysis.sweeps import reference, sweep_table, with_swept, zoomed

JOB = "fig6_scale"
TITLE = "Figure 6: scale of the synthetic sets"
KEY = "synthetic.scale"
COLUMNS = (
    Column("recover.forget_accuracy", "F-Set", "After recovery"),
    Column("recover.retain_accuracy", "R-Set", "After recovery"),
    Column("unlearn.client_compute_s", "unlearning", "Client compute", "seconds"),
    Column("recover.client_compute_s", "recovery", "Client compute", "seconds"),
    Column("total.storage_bytes", "stored", "Storage", "bytes"),
)


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run."""
    made: list[Table | Figure] = []
    for stem, what, runs in by_method.settings(results, JOB):
        outcomes = compare.outcomes(results, JOB)
        outcomes = with_swept(outcomes[outcomes["setting"].isin(runs["setting"])], KEY)
        line = reference(results, outcomes, "sga")
        title, notes = f"{TITLE} ({what})", by_method.warnings(results, runs)
        if line is None:
            notes.append("no dashed line: SGA-Or of these seeds and partitions comes from table2_cifar10")
        made.append(Figure(stem, title, partial(_draw, outcomes, line), notes))
        made.append(sweep_table(stem, title, outcomes, COLUMNS, "Figure 6", "s", notes))
    return made


def _draw(outcomes: pd.DataFrame, sga: float | None) -> mpl_figure.Figure:
    drawn, (left, right) = style.figure(style.TEXT_WIDTH, 2.5, 1, 2)
    color = style.METHOD_COLORS["quickdrop"]
    means = outcomes.groupby("swept")["recover.retain_accuracy"].agg(["mean", "std"])
    left.errorbar(
        means.index, means["mean"], yerr=means["std"].fillna(0), marker="o", color=color, capsize=2, label="QuickDrop"
    )
    if sga is not None:
        left.axhline(sga, color=style.METHOD_COLORS["sga"], ls="--", lw=1, label="SGA-Or (real samples)")
    zoomed(left, "R-Set accuracy")
    style.log_axis(left, "x", "scale s (one synthetic sample for s real ones)")
    left.legend()
    for phase, marker, line in (("unlearn", "o", "-"), ("recover", "s", "--")):
        column = f"{phase}.client_compute_s"
        if column in outcomes:
            cost = outcomes.groupby("swept")[column].mean()
            right.plot(
                cost.index,
                cost,
                line,
                marker=marker,
                color=color,
                label="unlearning" if phase == "unlearn" else "recovery",
            )
    style.log_axis(right, "x", "scale s")
    style.log_axis(right, "y", "client compute (s)")
    right.legend()
    return drawn
