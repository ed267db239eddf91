"""Table 4, right: client-level unlearning, IID."""

from analysis import by_method
from analysis.by_method import BEFORE, FINAL, SPEEDUP, TOTAL_S, Paper
from analysis.load import Results
from analysis.outputs import Table

JOB = "table4_client_iid"
TITLE = "Table 4, right: client-level unlearning, IID"
PAPER = Paper("Table 4 IID", ("cifar10",), 20, "IID")


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*BEFORE, *FINAL, TOTAL_S, SPEEDUP), PAPER)
