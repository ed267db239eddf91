"""Table 4, left: client-level unlearning, non-IID."""

from analysis import by_method
from analysis.by_method import BEFORE, FINAL, SPEEDUP, TOTAL_S
from analysis.load import Results
from analysis.outputs import Table

JOB = "table4_client_noniid"
TITLE = "Table 4, left: client-level unlearning, non-IID"


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*BEFORE, *FINAL, TOTAL_S, SPEEDUP), {"cifar10": "Table 4 non-IID"})
