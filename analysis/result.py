"""The result table of any experiment: accuracies of each stage, costs, speed-ups in three ways, storage."""

from dataclasses import replace

from analysis import by_method, compare
from analysis.load import Results
from analysis.outputs import Column, Table

COLUMNS = (
    *by_method.BEFORE,
    *(
        c
        for phase, title in (("unlearn", "Unlearning"), ("recover", "Recovery"))
        for c in by_method.stage(phase, title)
    ),
    *by_method.RELEARNED,
    *by_method.SPEEDUPS,
    *by_method.CONVERGED,
    *(Column(f"relearn_speedup.{cost}", name, "Relearning speed-up", "times") for cost, name in compare.COSTS.items()),
    Column("total.storage_bytes", "Storage", "", "bytes"),
)
NOTES = (
    "time: summed client compute; speed-ups: of unlearning and recovery against retraining, start-up excluded",
    f"to convergence: {compare.CONVERGED_RULE}",
)


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Table]:
    """Make the table of these runs, finished or not; finished ones on the seeds that all methods have."""
    outcomes = compare.outcomes(results)
    if outcomes.empty:
        return []
    left_out: list[str] = []
    if results.runs["sound"].all():
        outcomes, left_out = compare.paired(outcomes)
    stages = results.stages[results.stages["method"] != "shared"]
    reasons = "; ".join(sorted(set(stages["stop_reason"].dropna().astype(str))))
    said = [*NOTES, f"what ended the stages: {reasons}", *left_out, *notes]
    return [replace(by_method.build(stem, title, outcomes, COLUMNS, None, said), role="folded")]
