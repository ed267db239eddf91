"""Figure 5: fine-tuning steps F against R-Set accuracy, and against gradients computed on real data."""

from functools import partial

import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Figure, Table
from analysis.sweeps import reference, sweep_table, with_swept, zoomed

JOB = "fig5_finetune"
TITLE = "Figure 5: fine-tuning of the synthetic sets"
KEY = "synthetic.finetune"
COLUMNS = (
    Column("recover.forget_accuracy", "F-Set", "After recovery"),
    Column("recover.retain_accuracy", "R-Set", "After recovery"),
    Column("train.gradients_per_client", "training", "Gradients per client", "count"),
    Column("finetune.gradients_per_client", "fine-tuning", "Gradients per client", "count"),
)


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run."""
    made: list[Table | Figure] = []
    for stem, what, runs in by_method.settings(results, JOB):
        outcomes = compare.outcomes(results, JOB)
        outcomes = with_swept(outcomes[outcomes["setting"].isin(runs["setting"])], KEY)
        outcomes = outcomes.merge(_gradients(results, runs), on=["setting", "cell", "partition", "seed"], how="left")
        outcomes["finetune.gradients_per_client"] = outcomes["finetune.gradients_per_client"].fillna(0)
        line = reference(results, outcomes, compare.ORACLE)
        title, notes = f"{TITLE} ({what})", by_method.warnings(results, runs)
        if line is None:
            notes.append("no dashed line: Retrain-Or of these seeds and partitions comes from table2_cifar10")
        made.append(Figure(stem, title, partial(_draw, outcomes, line), notes))
        made.append(sweep_table(stem, title, outcomes, COLUMNS, "Figure 5", "F", notes))
    return made


def _gradients(results: Results, runs: pd.DataFrame) -> pd.DataFrame:
    """Return mini-batch gradients on real data per client, of training and of fine-tuning."""
    stages = results.stages
    stages = stages[stages["run_id"].isin(runs["run_id"]) & stages["phase"].isin(["train", "finetune"])]
    clients = results.runs.set_index("run_id")["clients"].astype(float)
    stages = stages.assign(per_client=stages["gradients"] / stages["run_id"].astype(str).map(clients))
    keys = ["setting", "cell", "partition", "seed"]
    wide = stages.pivot_table(index=keys, columns="phase", values="per_client", aggfunc="last", observed=True)
    wide.columns = [f"{phase}.gradients_per_client" for phase in wide.columns]
    for phase in ("train", "finetune"):
        if f"{phase}.gradients_per_client" not in wide:
            wide[f"{phase}.gradients_per_client"] = float("nan")
    return wide.reset_index()


def _draw(outcomes: pd.DataFrame, oracle: float | None) -> mpl_figure.Figure:
    drawn, (left, right) = style.figure(style.TEXT_WIDTH, 2.5, 1, 2)
    color = style.METHOD_COLORS["quickdrop"]
    means = outcomes.groupby("swept")["recover.retain_accuracy"].agg(["mean", "std"])
    left.errorbar(
        means.index, means["mean"], yerr=means["std"].fillna(0), marker="o", color=color, capsize=2, label="QuickDrop"
    )
    if oracle is not None:
        left.axhline(oracle, color=style.METHOD_COLORS["retrain"], ls="--", lw=1, label="Retrain-Or")
    zoomed(left, "R-Set accuracy")
    left.set_xlabel("fine-tuning steps F")
    left.legend()
    gradients = outcomes.groupby("swept")[["train.gradients_per_client", "finetune.gradients_per_client"]].mean()
    places = range(len(gradients))
    train, tuned = gradients["train.gradients_per_client"], gradients["finetune.gradients_per_client"]
    right.bar(places, train, color=style.METHOD_COLORS["federaser"], label="FL training")
    right.bar(places, tuned, bottom=train, color="#999999", label="fine-tuning")
    right.set_xticks(places, [f"{value:g}" for value in gradients.index])
    right.set_xlabel("fine-tuning steps F")
    right.set_ylabel("gradients on real data per client")
    right.grid(visible=False, axis="x")
    right.legend()
    return drawn
