"""Table 2: class-level unlearning of all methods with their stages, costs and speed-ups."""

from analysis import by_method
from analysis.by_method import SPEEDUP, TOTAL_S, Paper
from analysis.load import Results
from analysis.outputs import Column, Table

JOB = "table2_cifar10"
TITLE = "Table 2: class-level unlearning"
PAPER = Paper("Table 2", ("cifar10",), 10, "α = 0.1")
TOTAL = (Column(TOTAL_S.key, "Time", "Total", "seconds"), Column(SPEEDUP.key, "Speed-up", "Total", "times"))
NOTES = (
    "time: summed client compute of the rounds as run; the paper's seconds are those of its own GPU, to convergence",
    "to conv.: first round within 1 point of the stage's last R-Set accuracy, beside the rounds that the paper gives",
)


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    columns = (*by_method.stage("unlearn", "Unlearning"), *by_method.stage("recover", "Recovery"), *TOTAL)
    return by_method.tables(results, JOB, TITLE, columns, PAPER, NOTES)
