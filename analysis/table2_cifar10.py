"""Table 2: class-level unlearning of all methods with their stages, costs and speed-ups."""

from analysis import by_method, compare
from analysis.by_method import SPEEDUP, TOTAL_S
from analysis.load import Results
from analysis.outputs import Column, Table

JOB = "table2_cifar10"
TITLE = "Table 2: class-level unlearning"
TOTAL = (Column(TOTAL_S.key, "Time", "Total", "seconds"), Column(SPEEDUP.key, "Speed-up", "Total", "times"))
NOTES = (
    "time: summed client compute of the rounds as run; the paper's seconds are those of its own GPU",
    f"speed-up: {compare.CONVERGED_RULE}; the paper counts its 30 rounds of 200 likewise",
)


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    columns = (*by_method.stage("unlearn", "Unlearning"), *by_method.stage("recover", "Recovery"), *TOTAL)
    return by_method.tables(results, JOB, TITLE, columns, {"cifar10": "Table 2"}, NOTES)
