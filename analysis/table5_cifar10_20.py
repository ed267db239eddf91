"""Table 5, left: unlearning and relearning, 20 clients."""

from analysis import by_method
from analysis.by_method import FINAL, RELEARNED, Paper
from analysis.load import Results
from analysis.outputs import Table

JOB = "table5_cifar10_20"
TITLE = "Table 5, left: unlearning and relearning, 20 clients"
PAPER = Paper("Table 5 CIFAR-10", ("cifar10",), 20, "α = 0.1")


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*FINAL, *RELEARNED), PAPER)
