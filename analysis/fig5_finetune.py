"""Figure 5: fine-tuning steps F against R-Set accuracy, and against gradients computed on real data."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.ticker import MaxNLocator

from analysis import by_method, compare, style
from analysis.by_method import Paper
from analysis.load import Results
from analysis.outputs import Column, Figure, Table
from analysis.sweeps import accuracy_panel, reference, sweep_table, with_swept

JOB = "fig5_finetune"
TITLE = "Figure 5: fine-tuning of the synthetic sets"
PAPER = Paper("Figure 5", ("cifar10",), 10, "α = 0.1")
KEY = "synthetic.finetune"
COLUMNS = (
    Column("final.forget_accuracy", "F-Set", "After recovery"),
    Column("final.retain_accuracy", "R-Set", "After recovery"),
    Column("train.gradients_per_client", "training", "Gradients per client", "count"),
    Column("finetune.gradients_per_client", "fine-tuning", "Gradients per client", "count"),
)


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run."""
    made: list[Table | Figure] = []
    for stem, what, own in by_method.settings(results, JOB):
        outcomes, shown = with_swept(compare.outcomes(own), KEY)
        outcomes = outcomes.merge(_gradients(own), on=["run_id", "cell", "seed"], how="left")
        line, seeds = reference(results, outcomes, compare.ORACLE, ("model", "train"))
        source = f"mean of {seeds} seeds" if seeds else "none: it comes from qdsim run table2_cifar10"
        notes = [*shown, f"line of Retrain-Or: {source}", *by_method.warnings(own)]
        where = PAPER.where if PAPER.covers(own.runs.iloc[0]) else None
        title = f"{TITLE} ({what})"
        made.append(Figure(stem, title, partial(_draw, outcomes, where, line), notes))
        table = sweep_table(stem, title, outcomes, COLUMNS, where, "F", notes)
        made.append(by_method.only_like(table, own))
    return made


def _gradients(results: Results) -> pd.DataFrame:
    """Return mini-batch gradients on real data per client, of training and of fine-tuning."""
    stages = results.stages[results.stages["phase"].isin(["train", "finetune"])]
    owners = results.partitions.groupby(["run_id", "cell", "seed"], observed=True)["client_id"].nunique()
    keys = ["run_id", "cell", "seed"]
    wide = stages.pivot_table(index=keys, columns="phase", values="gradients", aggfunc="last", observed=True)
    found = pd.DataFrame(index=wide.index)
    for phase in ("train", "finetune"):
        total = wide[phase].fillna(0) if phase in wide else 0.0
        found[f"{phase}.gradients_per_client"] = total / owners.reindex(wide.index)
    return found.reset_index().astype({"run_id": str, "cell": str})


def _draw(outcomes: pd.DataFrame, where: str | None, oracle: float | None) -> mpl_figure.Figure:
    drawn, (left, right) = style.figure(style.TEXT_WIDTH, 2.5, 1, 2)
    accuracy_panel(left, outcomes, where, oracle, "retrain", "Retrain-Or")
    left.set_xlabel("fine-tuning steps F")
    left.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    gradients = outcomes.groupby("swept")[["train.gradients_per_client", "finetune.gradients_per_client"]].mean()
    places = range(len(gradients))
    train, tuned = gradients["train.gradients_per_client"], gradients["finetune.gradients_per_client"]
    right.bar(places, train, color=style.METHODS["federaser"].color, label="FL training")
    right.bar(places, tuned, bottom=train, color="#999999", label="fine-tuning")
    right.set_xticks(places, [f"{value:g}" for value in gradients.index])
    right.set_xlabel("fine-tuning steps F")
    right.set_ylabel("gradients on real data\nper client")
    right.grid(visible=False, axis="x")
    right.set_ylim(top=1.3 * (train + tuned).max())  # room for the legend above the bars
    right.legend(loc="upper left", ncols=2)
    return drawn
