"""Figure 6: scale parameter s against R-Set accuracy, and against the time of unlearning and recovery."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.by_method import Paper
from analysis.load import Results
from analysis.outputs import Column, Figure, Table
from analysis.sweeps import accuracy_panel, reference, sweep_table, with_swept

JOB = "fig6_scale"
TITLE = "Figure 6: scale of the synthetic sets"
PAPER = Paper("Figure 6", ("cifar10",), 10, "α = 0.1")
KEY = "synthetic.scale"
COLUMNS = (
    Column("final.forget_accuracy", "F-Set", "After recovery"),
    Column("final.retain_accuracy", "R-Set", "After recovery"),
    Column("unlearn.client_compute_s", "unlearning", "Client compute", "seconds"),
    Column("recover.client_compute_s", "recovery", "Client compute", "seconds"),
    Column("total.storage_bytes", "stored", "Storage", "bytes"),
)


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run."""
    made: list[Table | Figure] = []
    for stem, what, own in by_method.settings(results, JOB):
        outcomes, shown = with_swept(compare.outcomes(own), KEY)
        line, seeds = reference(results, outcomes, "sga", ("model", "train", "unlearn", "sga"))
        source = f"mean of {seeds} seeds" if seeds else "none: it comes from qdsim run table2_cifar10"
        notes = [*shown, f"line of SGA-Or, on the real samples: {source}", *by_method.warnings(own)]
        where = PAPER.where if PAPER.covers(own.runs.iloc[0]) else None
        title = f"{TITLE} ({what})"
        made.append(Figure(stem, title, partial(_draw, outcomes, where, line), notes))
        table = sweep_table(stem, title, outcomes, COLUMNS, where, "s", notes)
        made.append(by_method.only_like(table, own))
    return made


def _draw(outcomes: pd.DataFrame, where: str | None, sga: float | None) -> mpl_figure.Figure:
    drawn, (left, right) = style.figure(style.TEXT_WIDTH, 2.5, 1, 2)
    accuracy_panel(left, outcomes, where, sga, "sga", "SGA-Or (real samples)")
    style.log_axis(left, "x", "scale s (one synthetic sample for s real ones)")
    color = style.METHODS["quickdrop"].color
    for phase, name, marker, line in (("unlearn", "unlearning", "o", "-"), ("recover", "recovery", "s", "--")):
        if f"{phase}.client_compute_s" in outcomes:
            cost = outcomes.groupby("swept")[f"{phase}.client_compute_s"].mean()
            right.plot(cost.index, cost, line, marker=marker, color=color, label=name)
    style.log_axis(right, "x", "scale s")
    style.log_axis(right, "y", "client compute (s)")
    right.legend()
    return drawn
