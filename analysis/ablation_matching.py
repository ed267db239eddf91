"""What the matching buys: QuickDrop on matched synthetic samples, and on plain real ones of the same number."""

from analysis import by_method
from analysis.by_method import BEFORE, FINAL, RELEARNED, TOTAL_S
from analysis.load import Results
from analysis.outputs import Column, Table

JOB = "ablation_matching"
TITLE = "What the matching buys (beyond the paper)"
UNLEARNED = (
    Column("unlearn.forget_accuracy", "F-Set", "Unlearning"),
    Column("unlearn.retain_accuracy", "R-Set", "Unlearning"),
)


def make(results: Results) -> list[Table]:
    """Make the table for each setting that was run."""
    return by_method.tables(results, JOB, TITLE, (*BEFORE, *UNLEARNED, *FINAL, *RELEARNED, TOTAL_S))
