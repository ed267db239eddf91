"""Table 5, left: unlearning and relearning, 20 clients."""

from analysis import by_method
from analysis.by_method import FINAL, RELEARNT
from analysis.load import Results
from analysis.outputs import Table

JOB = "table5_cifar10_20"
TITLE = "Table 5, left: unlearning and relearning, 20 clients"


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*FINAL, *RELEARNT), {"cifar10": "Table 5 CIFAR-10"})
