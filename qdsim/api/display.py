"""What a person sees: a live screen in a terminal or a notebook, plain lines elsewhere, and the result table."""

from __future__ import annotations

import html
import io
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qdsim.experiment.progress import Event, Notice, Progress, Step
from qdsim.store.storage import StoragePath

if TYPE_CHECKING:  # none is needed to begin with; qdsim's bring torch
    import pandas as pd

    from qdsim.api.runs import Comparison
    from qdsim.experiment.plan import Plan

RESULT_WIDTH = 120
RESULT_COLUMNS = ("method", "model", "F-Set", "R-Set", "rounds", "samples", "compute", "speed-up")
NOTHING_SERVED = "no request has been served yet: no stage to show"
LINES_BELOW_PLAN = 10
SURE = 1.4
"""A time left is one number where its range is no wider."""
NOTEBOOK_LINES = 25
NOTEBOOK_WIDTH = 110
NOTEBOOK_EVERY_S = 0.25
NOTEBOOK_NOTES = 5
NOTEBOOK_CODE = '<pre style="line-height:normal; white-space:pre; overflow-x:auto">{code}</pre>'


class Display:
    """Shows progress events; ``with`` it around a run. A quiet console shows nothing."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._cell: NotebookCell | None = None
        self._said: list[str] = []
        """In a notebook: the lines above the live screen, and the notes."""
        self._began_s = time.monotonic()
        self._last: Progress | None = None
        self._score = ""
        """Of the phase that runs, after the round that it names."""
        self._doing = ""
        self._tasks: list[str] = []
        self._ended: dict[int, str] = {}
        """What became of the tasks that are done, by position in the plan."""

    def __enter__(self) -> Display:
        """Take the screen over, where there is one."""
        if self._console.quiet:
            return self
        if self._console.is_jupyter:
            self._cell = NotebookCell()
            self._cell.show(self._render())
        elif self._console.is_terminal:
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
        if self._cell is not None:  # of a run that failed the screen stays: it says where
            self._cell.show(self._head() if error is None else self._render())
            self._cell = None

    def begin(self, plan: Plan, run_dir: StoragePath) -> list[str]:
        """Say what is about to run, and where its results go; return what was said."""
        job = plan.job
        samples = int(plan.points[0].federations[0].partition.counts.sum())
        swept = f"{len(plan.points)} cells of {', '.join(job.sweep)}, " if job.sweep else ""
        self._tasks = [who(t.point.label, t.federation.seed, t.method, t.request.label) for t in plan.tasks()]
        about = (
            f"{job.name}: {job.data.dataset}, {job.partition.clients} clients, {samples:,} samples, {swept}"
            f"seeds {list(job.seeds)}, methods {', '.join(job.methods)}"
        )
        self._print(about)
        return [about, self.say_where(run_dir)]

    def say_where(self, run_dir: StoragePath) -> str:
        """Say where results are; return what was said."""
        where = f"results in {run_dir}"  # which cluster/slurm.sbatch reads
        self._print(where)
        return where

    def emit(self, event: Event) -> None:
        """Take an event in; print a line for a finished round and task (in a terminal: for a finished phase)."""
        now_s = time.monotonic()
        if isinstance(event, Notice):
            self._line(now_s, f"note: {event.text}")
            return
        if isinstance(event, Step):
            self._doing = str(event)
            if self._cell is not None:
                self._cell.show(self._render())
            elif self._live is None and event.done == event.total:
                self._line(now_s, self._doing)
            return
        self._doing = ""
        if self._last is None or event.whose != self._last.whose:
            self._score = ""
        self._last = event
        live = self._live is not None or self._cell is not None
        if event.finished:
            self._finish(event, now_s)
        elif event.row is not None:
            said = f"{percent_scores(event.row)}, {event.row['wall_s']:.1f} s"
            self._score = f"round {event.round_number}: {said}"
            if self._cell is None and (not live or event.phase_ended):
                left = event.left if not live else None  # the live screen says it already
                tail = f", {time_left(left.low_s, left.high_s)}" if left is not None else ""
                self._line(now_s, f"{place(event)}: {said}{tail}")
        if self._cell is not None and self._cell.is_due():
            self._cell.show(self._render())

    def _finish(self, event: Progress, now_s: float) -> None:
        """Note that a task has ended; a training that was found ready, or a task done before a resume, is said too."""
        if event.task < 0:
            self._line(now_s, f"{who(event.cell, event.seed, event.method, '')} {event.phase}: done before, reused")
            return
        self._ended[event.task] = outcome(event)
        if self._live is None and self._cell is None:
            said = f"{len(self._ended)}/{len(self._tasks)} done, {self._tasks[event.task]}: {self._ended[event.task]}"
            self._line(now_s, said)

    def _line(self, now_s: float, text: str) -> None:
        self._print(f"[{duration(now_s - self._began_s):>7}] {text}")

    def _print(self, text: str) -> None:
        if self._cell is None:
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            self._said = [*self._said[:2], *self._said[2:][-NOTEBOOK_NOTES + 1 :], text]
            self._cell.show(self._render())

    def _render(self) -> Group:
        event = self._last
        if event is None:
            doing = f": {self._doing}" if self._doing else ""
            return Group(self._head(), Text(f"starting, {duration(time.monotonic() - self._began_s)}{doing}"))
        left = event.left
        bars = Table.grid(padding=(0, 1))
        bars.add_row("run", ProgressBar(total=1.0, completed=event.share_done, width=40), f"{event.share_done:4.0%}")
        bars.add_row(
            "round",
            ProgressBar(total=max(event.clients, 1), completed=event.clients_done, width=40),
            f"{event.clients_done}/{event.clients} clients",
        )
        spent = duration(time.monotonic() - self._began_s)
        ahead = time_left(left.low_s, left.high_s) if left is not None else "time left not known yet"
        now = Text(f"{place(event)}   {self._doing or self._score}", style="bold")
        return Group(self._head(), self._plan(event), now, bars, Text(f"{spent} spent, {ahead}"))

    def _head(self) -> Group:
        return Group(*(Text(text) for text in self._said))

    def _plan(self, event: Progress) -> Table:
        """One line for each task: done with its scores, running, or waiting; those around the running one."""
        height = self._console.height if self._cell is None else NOTEBOOK_LINES
        room = max(3, min(len(self._tasks), height - LINES_BELOW_PLAN))
        running = event.task if event.task >= 0 else len(self._ended)
        first = max(0, min(running - room // 2, len(self._tasks) - room))
        table = Table.grid(padding=(0, 2))
        if first:
            table.add_row("", f"… {first} more before", "")
        for i in range(first, min(first + room, len(self._tasks))):
            if i in self._ended:
                table.add_row("[green]done[/green]", self._tasks[i], self._ended[i])
            elif i == event.task:
                table.add_row("[bold]now[/bold]", self._tasks[i], f"{event.phase} {event.round_number}/{event.rounds}")
            else:
                table.add_row("[dim]-[/dim]", f"[dim]{self._tasks[i]}[/dim]", "")
        rest = len(self._tasks) - first - room
        if rest > 0:
            table.add_row("", f"… {rest} more after", "")
        return table


class NotebookCell:
    """One output of a notebook's cell, replaced whenever there is something new; it needs no widgets."""

    def __init__(self) -> None:
        from IPython import display

        shown: Any = display  # it is typed in part
        self._handle = shown.display({"text/plain": ""}, raw=True, display_id=True)
        self._shown_s = 0.0

    def is_due(self) -> bool:
        """Tell whether the last time was long enough ago: a front end is slower than a terminal."""
        return time.monotonic() - self._shown_s > NOTEBOOK_EVERY_S

    def show(self, content: RenderableType) -> None:
        """Replace what is shown."""
        self._shown_s = time.monotonic()
        console = Console(
            file=io.StringIO(),
            width=NOTEBOOK_WIDTH,
            record=True,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
        )
        console.print(content, highlight=False)
        page = console.export_html(inline_styles=True, code_format=NOTEBOOK_CODE, clear=False)
        self._handle.update({"text/html": page, "text/plain": console.export_text()}, raw=True)


def who(cell: str, seed: int, method: str, request: str) -> str:
    """Return whose phase it is."""
    return " ".join(name for name in (cell, f"seed {seed}", method, request) if name)


def place(event: Progress) -> str:
    """Return whose round it is, and which."""
    named = who(event.cell, event.seed, event.method, event.request)
    return f"{named} {event.phase}" + (f" {event.round_number}/{event.rounds}" if event.rounds else "")


def outcome(event: Progress) -> str:
    """Return what became of a task that is done, and from where it was taken if it was not computed."""
    without = "done before" if event.phase else "nothing left to train on"
    scores = percent_scores(event.row) if event.row else without
    return f"{scores}, reused from {event.reused_from}" if event.reused_from else scores


def percent_scores(row: Mapping[str, Any]) -> str:
    """Return a round's accuracies."""
    parts = [f"test {row['test_accuracy']:.1%}"]
    for name, key in (("F-Set", "forget_accuracy"), ("R-Set", "retain_accuracy")):
        if row.get(key) is not None:
            parts.append(f"{name} {row[key]:.1%}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def time_left(low_s: float, high_s: float) -> str:
    """Return how long a run still takes: a range, where it is not known better."""
    if high_s <= SURE * low_s or high_s < 1:
        return f"{duration((low_s * high_s) ** 0.5)} left"
    return f"{duration(low_s)} to {duration(high_s)} left"


def wide(console: Console, width: int = RESULT_WIDTH) -> Console:
    """Return a console that prints tables whole where there is no terminal: nobody sets a width there."""
    return console if console.is_terminal else Console(width=width, file=console.file)


def print_result(console: Console, run_dir: StoragePath) -> None:
    """Print the result table of a run with what must be said under it."""
    from qdsim.store import summary  # pandas is not needed before the end

    console = wide(console)
    summary.check_whole(run_dir)
    titles = summary.method_titles(run_dir)
    table = summary.stage_table(run_dir)
    if table.empty:
        console.print(NOTHING_SERVED)
    else:
        several = bool((table["n"] > 1).any())
        for title, stages in _by_request(table):
            console.print(_result_table(title, stages, titles, several))
    attacks = summary.membership_table(run_dir)
    for (cell, request), rows in attacks.groupby(["cell", "request"], sort=False) if len(attacks) else ():
        console.print(_membership_table(f"{request}  {cell}".rstrip(), [rows], titles))
    for note in summary.notes(run_dir):
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"tables: {run_dir / 'tables'}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"report: qdsim report {shlex.quote(str(run_dir))}", highlight=False, soft_wrap=True, markup=False)


def print_comparison(console: Console, found: Comparison) -> None:
    """Print several runs beside each other: which they are, in what their settings differ, their results."""
    from qdsim.store import summary

    console = wide(console)
    for letter, run_dir in found.runs.items():
        console.print(f"{letter}  {run_dir}", highlight=False, soft_wrap=True, markup=False)
    if found.settings:
        table = Table(title="what differs", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("key", *found.runs):
            table.add_column(name, overflow="fold")
        for key, values in found.settings.items():
            table.add_row(_said(key), *(_said(values[letter]) for letter in found.runs))
        console.print(table)
    else:
        console.print("their settings are the same")
    if found.stages.empty:
        console.print(NOTHING_SERVED)
    titles = {key: title for run in found.runs.values() for key, title in summary.method_titles(run).items()}
    for (cell, request), rows in found.stages.groupby(["cell", "request"], sort=False) if len(found.stages) else ():
        title = _said(f"forget {f'{request}  {cell}'.rstrip()}")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("run")
        for name in (*RESULT_COLUMNS, "n"):
            table.add_column(name, justify="left" if name in ("method", "model") else "right", no_wrap=True)
        named = rows.assign(phase=rows["phase"].replace(summary.STAGE_NAMES))
        several = bool((named["n"] > 1).any())
        for _, stage in named.groupby(["method", "phase"], sort=False):
            for row in stage.to_dict("records"):
                table.add_row(row["run"], *_result_cells(row, titles, several), str(row["n"]))
        console.print(table)
    attacks = found.membership
    for (cell, request), rows in attacks.groupby(["cell", "request"], sort=False) if len(attacks) else ():
        alike = [own for _, own in rows.groupby(["attack", "method"], sort=False)]  # each measured in run after run
        console.print(_membership_table(f"{request}  {cell}".rstrip(), alike, titles))
    for letter, run_dir in found.runs.items():
        for note in summary.notes(run_dir):
            console.print(f"note on {letter}: {note}", highlight=False, soft_wrap=True, markup=False)


def result_html(run_dir: StoragePath) -> str:
    """Return the result table of a run, and what must be said under it, as a notebook shows it."""
    import pandas as pd

    from qdsim.store import summary

    titles = summary.method_titles(run_dir)
    table = summary.stage_table(run_dir)
    found = [] if len(table) else [f"<p>{NOTHING_SERVED}</p>"]
    several = bool((table["n"] > 1).any()) if len(table) else False
    for title, stages in _by_request(table) if len(table) else ():
        cells = [_result_cells(row, titles, several) for row in stages.to_dict("records")]
        found.append(f"<p>{html.escape(title)}</p>")
        found.append(pd.DataFrame(cells, columns=list(RESULT_COLUMNS)).to_html(index=False, border=0))
    found += [f"<p>note: {html.escape(note)}</p>" for note in summary.notes(run_dir)]
    return "\n".join(found)


def _by_request(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the stages of each cell and request under a title."""
    from qdsim.store import summary

    for (cell, request), rows in table.groupby(["cell", "request"], sort=False):
        seeds = int(rows["n"].max())
        title = f"forget {f'{request}  {cell}'.rstrip()}  (n = {seeds} seed{'s' if seeds > 1 else ''})"
        yield title, rows.assign(phase=rows["phase"].replace(summary.STAGE_NAMES))


def _result_table(title: str, rows: pd.DataFrame, titles: dict[str, str], several: bool) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in RESULT_COLUMNS:
        table.add_column(name, justify="left" if name in ("method", "model") else "right", no_wrap=True)
    for row in rows.to_dict("records"):
        table.add_row(*_result_cells(row, titles, several))
    return table


def _result_cells(row: Mapping[Any, Any], titles: dict[str, str], several: bool) -> list[str]:
    """Return a stage's row as :data:`RESULT_COLUMNS` has it."""
    return [
        _said(titles.get(row["method"], row["method"])),
        _said(row["phase"]),
        _percent(row["forget_accuracy"], row["forget_accuracy_sd"], several),
        _percent(row["retain_accuracy"], row["retain_accuracy_sd"], several),
        f"{row['rounds_run']:.0f}",
        f"{row['samples']:,.0f}",
        f"{row['client_compute_s']:.2f} s",
        f"{row['speedup']:.1f}x" if row["speedup"] is not None and not math.isnan(row["speedup"]) else "",
    ]


def _said(text: object) -> str:
    """Return what a file says as it is shown: nothing in it is an order, to the terminal or to the layout."""
    from qdsim.store.run_directory import printable

    return escape(printable(str(text)))


def _membership_table(request: str, groups: list[pd.DataFrame], titles: dict[str, str]) -> Table:
    """How often an attack takes samples for members; Retrain-Or's rate is the aim. Of several runs each is named."""
    named = ["run"] if "run" in groups[0] else []
    title = _said(f"membership inference, forget {request}")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (*named, "attack", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("F-Set rate", "to Retrain-Or", "F-Set AUC", "TPR at 1% FPR", "R-Set rate", "R-Set AUC"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (row for rows in groups for row in rows.to_dict("records")):
        gap = row["forget_gap"]
        table.add_row(
            *(row[name] for name in named),
            _said(row["attack"]),
            _said(titles.get(row["method"], row["method"])),
            f"{row['member_rate_forget']:.1%}",
            "-" if math.isnan(gap) else f"{100 * gap:+.1f}",
            f"{row['auc_forget']:.3f}",
            f"{row['tpr_at_1pct_fpr_forget']:.1%}",
            f"{row['member_rate_retain']:.1%}",
            f"{row['auc_retain']:.3f}",
        )
    return table


def _percent(value: float, deviation: float, several: bool) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.2%}" + (f" ± {100 * deviation:.2f}" if several and not math.isnan(deviation) else "")
