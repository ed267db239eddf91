"""How little recovery needs: R-Set accuracy against the speed-up, over local steps and rounds; where a rule stops.

The rule is that of ``recover.stop = "loss"`` (``qdsim/algorithms/stopping.py``): it looks at the clients' own losses,
not at test data. Here it is applied to rounds that went on.
"""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib import figure as mpl_figure

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Figure, Missing, Table
from analysis.sweeps import same_federation, with_swept

JOB = "recovery_steps"
TITLE = "Recovery: how few steps and rounds"
KEY = "recover.steps"
FALLS = 0.05
"""Of the loss, from one round to the next: less is settled."""
PAPER_ROUNDS, PAPER_STEPS, PAPER_BATCH = 200, 50, 256
COSTS = {"samples": "samples", "client_compute_s": "client compute"}
COLUMNS = (
    Column("round", "Rounds", "", "count"),
    Column("forget_accuracy", "F-Set", "After recovery"),
    Column("retain_accuracy", "R-Set", "After recovery"),
    Column("full.samples", "samples", "Against retraining in full", "times"),
    Column("full.client_compute_s", "compute", "Against retraining in full", "times"),
    Column("until.samples", "samples", "Against retraining until converged", "times"),
    Column("until.client_compute_s", "compute", "Against retraining until converged", "times"),
    Column("paper.samples", "predicted", "At the paper's K = 200, T = 50", "times"),
)
SECTIONS = ("model", "train")


def make(results: Results) -> list[Table | Figure]:
    """Make figure and table for each setting that was run, beside a retraining of the same federation."""
    made: list[Table | Figure] = []
    for stem, what, own in by_method.settings(results, JOB):
        outcomes, shown = with_swept(compare.outcomes(own), KEY)
        retrained = same_federation(results, outcomes, "retrain", SECTIONS)
        if retrained.empty:
            raise Missing("qdsim run table2_cifar10: retraining of the same seed, partition and settings")
        points = _points(own, outcomes, retrained)
        goal = float(retrained["final.retain_accuracy"].mean())
        seeds = retrained["seed"].nunique()
        notes = [
            *shown,
            f"retraining: R-Set {100 * goal:.1f} %, mean of {seeds} {'seed' if seeds == 1 else 'seeds'}",
            f"table and rings: the round in which the clients' loss first fell by less than {FALLS:.0%}",
            compare.CONVERGED_RULE,
            f"predicted: retraining at K = {PAPER_ROUNDS}, T = {PAPER_STEPS}, batches of {PAPER_BATCH}, against the "
            "unlearning and recovery that was measured",
            *by_method.warnings(own),
        ]
        title = f"{TITLE} ({what})"
        made.append(Figure(stem, title, partial(_draw, points, goal), notes))
        made.append(_table(stem, title, points, notes))
    return made


def _points(own: Results, outcomes: pd.DataFrame, retrained: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each round of recovery: accuracies, what it has cost so far, and the speed-ups."""
    keys = ["run_id", "cell", "seed", "request"]
    texts = {name: str for name in ("partition", *keys) if name != "seed"}
    rounds = own.rounds[own.rounds["phase"].isin(["unlearn", "recover"]) & (own.rounds["method"] == "quickdrop")]
    rounds = rounds.astype(texts)
    rounds = rounds.merge(outcomes[[*keys, "swept"]].drop_duplicates(), on=keys)
    before = rounds[rounds["phase"] == "unlearn"].groupby(keys)[list(COSTS)].sum().add_prefix("before.")
    points = rounds[rounds["phase"] == "recover"].sort_values("round").join(before, on=keys)
    sums = points.groupby(keys)[list(COSTS)].cumsum()
    for cost in COSTS:
        points[f"so_far.{cost}"] = sums[cost] + points[f"before.{cost}"]
    fallen = points.groupby(keys)["start_loss"].pct_change()
    points["settled"] = points["round"].where(fallen > -FALLS)
    by_request = points.groupby(keys)
    # a loss that was still falling when the rounds were over: the last of them
    ends = by_request["settled"].transform("min").fillna(by_request["round"].transform("max"))
    points["chosen"] = points["round"] == ends
    same = ["partition", "seed", "request"]
    costs = [f"{kind}.{cost}" for kind in ("total", "until") for cost in COSTS]
    points = points.merge(retrained[[*same, *costs]], on=same)
    for cost in COSTS:
        points[f"full.{cost}"] = points[f"total.{cost}"] / points[f"so_far.{cost}"]
        points[f"until.{cost}"] = points[f"until.{cost}"] / points[f"so_far.{cost}"]
    points["paper.samples"] = _paper_samples(own) / points["so_far.samples"]
    return points


def _paper_samples(own: Results) -> float:
    """Return the samples of retraining at the paper's size on this partition."""
    counts = own.partitions.drop_duplicates(["seed", "client_id", "class"])
    first = counts[counts["seed"] == counts["seed"].iloc[0]]
    gone = own.rounds["request"].astype(str).str.extract(r"class:(\d+)")[0].dropna().astype(int).unique()
    sizes = first[~first["class"].isin(gone[:1])].groupby("client_id")["num_samples"].sum()
    return float(np.minimum(sizes, PAPER_BATCH).sum()) * PAPER_STEPS * PAPER_ROUNDS


def _table(stem: str, title: str, points: pd.DataFrame, notes: list[str]) -> Table:
    chosen = points[points["chosen"]]
    summary = compare.summarize(chosen, ["swept"], [c.key for c in COLUMNS]).sort_values("swept", kind="stable")
    summary["row"] = [f"T = {steps:g}" for steps in summary["swept"]]
    summary = compare.beside_paper(summary, None, row="row")
    return Table(stem, title, COLUMNS, summary.reset_index(drop=True), "local steps", notes)


def _draw(points: pd.DataFrame, goal: float) -> mpl_figure.Figure:
    drawn, axes = style.figure(style.TEXT_WIDTH, 3.0, columns=2, sharey=True)
    for axis, (cost, name) in zip(axes, COSTS.items(), strict=True):
        for i, (steps, own) in enumerate(points.groupby("swept")):
            mean = own.groupby("round")[[f"full.{cost}", "retain_accuracy"]].mean()
            color = style.CLASS_COLORS[2 * i % len(style.CLASS_COLORS)]
            axis.plot(mean[f"full.{cost}"], mean["retain_accuracy"], "o-", color=color, label=f"T = {steps:g}")
            ends = own[own["chosen"]]
            ringed = (ends[f"full.{cost}"], ends["retain_accuracy"])
            axis.scatter(*ringed, s=70, facecolors="none", edgecolors=color, zorder=3)
        axis.axhline(goal, color=style.METHODS["retrain"].color, lw=1, label="retraining")
        axis.axhspan(goal - 0.01, goal, color="#DDDDDD", zorder=0, label="1 point below")
        style.log_axis(axis, "x", f"speed-up against retraining ({name})")
        style.as_percent(axis.yaxis)
    axes[0].set_ylabel("R-Set accuracy (%)")
    style.legend(drawn, axes)
    return drawn
