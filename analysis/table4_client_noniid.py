"""Table 4, left: client-level unlearning, non-IID."""

from analysis import by_method
from analysis.by_method import BEFORE, FINAL, SPEEDUP, TOTAL_S, Paper
from analysis.load import Results
from analysis.outputs import Table

JOB = "table4_client_noniid"
TITLE = "Table 4, left: client-level unlearning, non-IID"
PAPER = Paper("Table 4 non-IID", ("cifar10",), 20, "α = 0.1")


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*BEFORE, *FINAL, TOTAL_S, SPEEDUP), PAPER)
