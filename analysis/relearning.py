"""How much faster QuickDrop relearns than the others do (§4.7: 66.7 times Retrain-Or, 47.29 times SGA-Or)."""

import pandas as pd

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Missing, Table

JOB = "table5_mnist_20"
TITLE = "Relearning: how much faster QuickDrop is (§4.7)"
COLUMNS = (
    Column("relearn.speedup", "client compute", "QuickDrop's relearning against it", "times"),
    Column("relearn.speedup_path", "critical path", "QuickDrop's relearning against it", "times"),
    Column("relearn.speedup_samples", "samples", "QuickDrop's relearning against it", "times"),
)


def make(results: Results) -> list[Table]:
    """Make one table over all finished experiments with relearning."""
    outcomes = compare.outcomes(results)
    if "relearn.client_compute_s" not in outcomes:
        raise Missing(f"qdsim run jobs/{JOB}.toml")
    costs = [f"relearn.{cost}" for cost in compare.COSTS]
    relearnt = outcomes.dropna(subset=costs)
    same = ["job", *compare.SAME]
    own = relearnt[relearnt["method"] == "quickdrop"].set_index(same)[costs].add_suffix("_own")
    others = relearnt[relearnt["method"] != "quickdrop"].join(own, on=same, how="inner")
    if others.empty:
        raise Missing(f"qdsim run jobs/{JOB}.toml")
    for cost, column in zip(costs, COLUMNS, strict=True):
        others[column.key] = others[cost] / others[f"{cost}_own"]
    described = {run["setting"]: by_method.describe(run) for _, run in results.runs.iterrows()}
    others["what"] = others["setting"].astype(str).map(described)
    others = others.astype({"job": str, "method": str})
    summary = compare.summarize(others, ["job", "what", "method"], [column.key for column in COLUMNS])
    summary = compare.beside_paper(summary, "Relearning")
    ranks = {method: i for i, method in enumerate(style.method_order(summary["method"]))}
    summary = summary.assign(rank=summary["method"].map(ranks)).sort_values(["job", "what", "rank"], kind="stable")
    summary["row"] = [f"{s.what} · {style.method(s.method)}" for s in summary.itertuples(index=False)]
    smoke = pd.Series([results.runs.set_index("run_id")["profile"].get(r, "") for r in results.sound])
    notes = ["the paper does not say on which data"]
    if (smoke == "smoke").any():
        notes.append("profile smoke: these numbers show that the job runs, and mean nothing else")
    return [Table("relearning", TITLE, COLUMNS, summary.drop(columns="rank").reset_index(drop=True), "against", notes)]
