"""Table 3: class-level unlearning with 100 clients."""

from analysis import by_method
from analysis.by_method import FINAL, SPEEDUP, TOTAL_S, Paper
from analysis.load import Results
from analysis.outputs import Table

JOB = "table3_svhn_100"
TITLE = "Table 3: class-level unlearning with 100 clients"
PAPER = Paper("Table 3", ("svhn", "svhn+extra"), 100, "α = 0.1")


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*FINAL, TOTAL_S, SPEEDUP), PAPER)
