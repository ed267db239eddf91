"""What a person sees: a live screen in a terminal, plain lines elsewhere, and the result table."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pandas as pd
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qdsim import summary

if TYPE_CHECKING:  # neither is needed to show a finished run, and both bring torch
    from qdsim.experiment import Progress
    from qdsim.plan import Plan

RESULT_WIDTH = 120


class Display:
    """Shows progress events; ``with`` it around a run."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._began_s = time.monotonic()
        self._last: Progress | None = None
        self._marks: list[tuple[float, float]] = []
        self._score = ""

    def __enter__(self) -> Display:
        """Take the screen over, where there is one."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the screen back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def begin(self, plan: Plan, run_dir: Path) -> None:
        """Say what is about to run, and where its results go."""
        job = plan.job
        sizes = [int(s.partition.counts.sum()) for s in plan.seeds]
        self._console.print(
            f"{job.name}: {job.data.dataset}, {job.partition.clients} clients, {sizes[0]:,} samples, "
            f"seeds {list(job.seeds)}, methods {', '.join(job.methods)}",
            highlight=False,
            soft_wrap=True,
        )
        self._console.print(f"results in {run_dir}", highlight=False, soft_wrap=True)

    def emit(self, event: Progress) -> None:
        """Take an event in; print a line for a finished round (in a terminal: for a finished phase)."""
        now_s = time.monotonic()
        self._last = event
        if not self._marks or event.share_done > self._marks[-1][1]:
            self._marks = [*self._marks[-20:], (now_s, event.share_done)]
        if event.row is None:
            return
        self._score = _scores(event)
        if self._live is None or event.round_number == event.rounds:
            left = self._left_s() if self._live is None else None  # the live screen says it already
            tail = f", {_duration(left)} left" if left is not None else ""
            line = f"[{_duration(now_s - self._began_s):>7}] {_place(event)}: {self._score}"
            self._console.print(line + tail, highlight=False, soft_wrap=True)

    def _left_s(self) -> float | None:
        """Guess the time left from the rate of the last rounds."""
        if len(self._marks) < 2:
            return None
        (then_s, then), (last_s, last) = self._marks[0], self._marks[-1]
        return (1 - last) * (last_s - then_s) / (last - then) if last > then else None

    def _render(self) -> Group:
        event = self._last
        if event is None:
            return Group(Text(f"starting, {_duration(time.monotonic() - self._began_s)}"))
        left = self._left_s()
        bars = Table.grid(padding=(0, 1))
        bars.add_row("run", ProgressBar(total=1.0, completed=event.share_done, width=40), f"{event.share_done:4.0%}")
        bars.add_row(
            "round",
            ProgressBar(total=max(event.clients, 1), completed=event.clients_done, width=40),
            f"{event.clients_done}/{event.clients} clients",
        )
        spent = _duration(time.monotonic() - self._began_s)
        ahead = f"{_duration(left)} left" if left is not None else "time left not known yet"
        return Group(Text(f"{_place(event)}   {self._score}", style="bold"), bars, Text(f"{spent} spent, {ahead}"))


def _place(event: Progress) -> str:
    who = event.method if not event.request else f"{event.method} {event.request}"
    return f"seed {event.seed} {who} {event.phase} {event.round_number}/{event.rounds}"


def _scores(event: Progress) -> str:
    row = event.row or {}
    parts = [f"test {row['test_accuracy']:.1%}"]
    for name, key in (("F-Set", "forget_accuracy"), ("R-Set", "retain_accuracy")):
        if row.get(key) is not None:
            parts.append(f"{name} {row[key]:.1%}")
    return ", ".join([*parts, f"{row['wall_s']:.1f} s"])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def print_result(console: Console, run_dir: Path) -> None:
    """Print the result table of a run with what must be said under it."""
    if not console.is_terminal:  # nobody sets a width there, so nothing should be cut off
        console = Console(width=RESULT_WIDTH, file=console.file)
    titles = summary.method_titles(run_dir)
    table = summary.stage_table(run_dir)
    if table.empty:
        console.print("no request has been served yet: no stage to show")
    else:
        several = bool((table["n"] > 1).any())
        for request, rows in table.groupby("request", sort=False):
            console.print(_result_table(str(request), rows, titles, several))
    for note in summary.notes(run_dir):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(f"tables: {run_dir / 'tables'}", highlight=False, soft_wrap=True)


def _result_table(request: str, rows: pd.DataFrame, titles: dict[str, str], several: bool) -> Table:
    seeds = int(rows["n"].max())
    title = f"forget {request}  (n = {seeds} seed{'s' if seeds > 1 else ''})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("method", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("F-Set", "R-Set", "rounds", "samples", "compute", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows.to_dict("records"):
        table.add_row(
            titles.get(row["method"], row["method"]),
            summary.STAGE_NAMES.get(row["phase"], row["phase"]),
            _percent(row["forget_accuracy"], row["forget_accuracy_sd"], several),
            _percent(row["retain_accuracy"], row["retain_accuracy_sd"], several),
            f"{row['rounds_run']:.0f}",
            f"{row['samples']:,.0f}",
            f"{row['client_compute_s']:.2f} s",
            f"{row['speedup']:.1f}x" if row["speedup"] is not None and not math.isnan(row["speedup"]) else "",
        )
    return table


def _percent(value: float, deviation: float, several: bool) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2%}" + (f" ± {100 * deviation:.2f}" if several and not math.isnan(deviation) else "")
