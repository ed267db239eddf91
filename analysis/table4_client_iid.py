"""Table 4, right: client-level unlearning, IID."""

from analysis import by_method
from analysis.by_method import BEFORE, FINAL, SPEEDUP, TOTAL_S
from analysis.load import Results
from analysis.outputs import Table

JOB = "table4_client_iid"
TITLE = "Table 4, right: client-level unlearning, IID"


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*BEFORE, *FINAL, TOTAL_S, SPEEDUP), {"cifar10": "Table 4 IID"})
