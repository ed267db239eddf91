"""How much faster QuickDrop relearns than the others do (§4.7: 66.7 times Retrain-Or, 47.29 times SGA-Or)."""

from analysis import by_method, compare
from analysis.by_method import Paper
from analysis.load import Results
from analysis.outputs import Column, Missing, Table

JOB = "table5_mnist_20"
TITLE = "Relearning: how much faster QuickDrop is (§4.7)"
PAPER = Paper("Relearning", ("mnist",), 20, "α = 0.1")
COLUMNS = (
    Column("relearn.speedup", "client compute", "QuickDrop's relearning against it", "times"),
    Column("relearn.speedup_path", "critical path", "QuickDrop's relearning against it", "times"),
    Column("relearn.speedup_samples", "samples", "QuickDrop's relearning against it", "times"),
)


def make(results: Results) -> list[Table]:
    """Make one table over all finished experiments with relearning."""
    sound = results.sound
    outcomes = compare.outcomes(sound)
    costs = [f"relearn.{cost}" for cost in compare.COSTS]
    if not set(costs) <= set(outcomes):
        raise Missing(f"qdsim run {JOB}")
    relearned = outcomes.dropna(subset=costs)
    own = relearned[relearned["method"] == "quickdrop"][["run_id", *compare.SAME, *costs]]
    others = relearned[relearned["method"] != "quickdrop"].merge(
        own, on=["run_id", *compare.SAME], suffixes=("", "_own")
    )
    if others.empty:
        raise Missing(f"qdsim run {JOB}")
    for cost, column in zip(costs, COLUMNS, strict=True):
        others[column.key] = others[cost] / others[f"{cost}_own"]
    described = {run["setting"]: by_method.describe(run) for _, run in sound.runs.iterrows()}
    others["what"] = others["setting"].map(described)
    rows = ["job", "what", "setting", "cell", "asked", "method"]
    summary = compare.beside_paper(compare.summarize(others, rows, [c.key for c in COLUMNS]), PAPER.where)
    covered = {run["setting"] for _, run in sound.runs.iterrows() if PAPER.covers(run)}
    summary.loc[~summary["setting"].isin(covered), ["paper", "difference"]] = float("nan")
    summary = by_method.labelled(summary, rows).reset_index(drop=True)
    notes = ["the paper's sentence follows its MNIST results", *by_method.warnings(sound)]
    table = Table("relearning", TITLE, COLUMNS, summary, "against", notes)
    return [by_method.only_like(table, sound)]
