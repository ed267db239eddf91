"""Table 5, right: unlearning and relearning, 20 clients."""

from analysis import by_method
from analysis.by_method import FINAL, RELEARNT
from analysis.load import Results
from analysis.outputs import Table

JOB = "table5_mnist_20"
TITLE = "Table 5, right: unlearning and relearning, 20 clients"


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*FINAL, *RELEARNT), {"mnist": "Table 5 MNIST"})
