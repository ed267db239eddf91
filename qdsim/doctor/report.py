"""A report as a person reads it, and as a file that one attaches to a message."""

import io

from rich import box
from rich.console import Console
from rich.table import Table

from qdsim.doctor.checks import Report, cleaned, secrets_of_this_machine

STYLES = {"pass": "green", "fail": "red", "not checked": "yellow"}
FILE_WIDTH = 140


def table(report: Report) -> Table:
    """One line a check."""
    found = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("check", "where", "outcome", "what was seen"):
        found.add_column(column, overflow="fold")
    for check in report.checks:
        outcome = check.outcome if check.stops or check.outcome != "fail" else "fail, would stop no run"
        found.add_row(check.name, check.where, f"[{STYLES[check.outcome]}]{outcome}[/]", check.says)
    return found


def verdict(report: Report) -> str:
    """Say in a line what it comes to."""
    failed = [check.name for check in report.checks if check.stops]
    left = sum(check.outcome == "not checked" for check in report.checks)
    unknown = f"; {left} could not be checked here" if left else ""
    if failed:
        return f"{len(failed)} would stop a run: {', '.join(dict.fromkeys(failed))}{unknown}"
    harmless = [check.name for check in report.checks if check.outcome == "fail"]
    if harmless:
        return f"all that would stop a run is well, but not: {', '.join(dict.fromkeys(harmless))}{unknown}"
    return f"all that was checked is well{unknown}"


def as_file(report: Report) -> str:
    """Return the table and all numbers, without paths of the user, names of hosts, or tokens."""
    lines = io.StringIO()
    console = Console(file=lines, width=FILE_WIDTH, color_system=None)
    console.print(table(report))
    console.print(verdict(report), markup=False)
    text = cleaned(lines.getvalue(), secrets_of_this_machine())
    return f"qdsim doctor\n\n{text}\n{report.as_json()}\n"
