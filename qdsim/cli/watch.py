"""``qdsim status`` and ``qdsim top``: a run as its files show it, from any machine that sees them."""

import shlex
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qdsim.api import log
from qdsim.api.display import duration, percent_scores, time_left, who
from qdsim.errors import BadInput
from qdsim.experiment import status
from qdsim.experiment.status import Status
from qdsim.store import run_directory
from qdsim.store.storage import StoragePath

STALE_S = 300.0
LOOK_EVERY_S = 2.0
SAID = {
    "gone": "no live process owns this run: qdsim resume {run} continues from its last commit",
    "interrupted": "qdsim resume {run} continues from its last commit",
    "failed": "qdsim resume {run} continues from its last commit, once the cause is fixed",
}


def print_status(console: Console, run_dir: StoragePath) -> None:
    """Print where a run is, once."""
    console.print(_screen(status.read(run_dir), run_dir), soft_wrap=True)


def top(console: Console, run_dir: StoragePath, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show where a run is until it is over."""
    found = status.read(run_dir)
    with Live(_screen(found, run_dir), console=console, auto_refresh=False) as live:
        while found.state == "running":
            sleep(LOOK_EVERY_S)
            found = status.read(run_dir)
            live.update(_screen(found, run_dir), refresh=True)


def print_log(
    run_dir: StoragePath, say: Callable[[str], None], *, follow: bool, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Print what a run has logged; with ``follow`` also what it logs from now on, until it is over."""
    run_directory.read_manifest(run_dir)
    path, printed, is_over = run_dir / log.FILE, 0, not follow
    while True:
        if not is_over and not status.is_running(run_dir):
            sleep(LOOK_EVERY_S)  # it says how it ended when it has noted that it has
            is_over = True
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = b""
            if is_over:
                why = "it has no log.txt: a run of an older version, or one in an object store that goes on"
                raise BadInput("RUN", str(run_dir), f"{why}; see qdsim status") from None
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole[printed:].decode(errors="replace").splitlines():
            say(run_directory.printable(line))
        printed = len(whole)
        if is_over:
            return
        sleep(LOOK_EVERY_S)


def _screen(found: Status, run_dir: StoragePath) -> RenderableType:
    colour = {"done": "green", "running": "bold", "failed": "red", "gone": "red"}.get(found.state, "yellow")
    lines: list[RenderableType] = [Text.assemble(f"{found.run_id}  ", (found.state, colour), f"  {found.error}")]
    now = found.progress
    if now.get("phase"):
        lines.append(_bars(now, goes_on=found.state == "running"))
        lines.append(Text(_place(now)))
    elif found.state == "running":
        doing = f"; {now['doing']}" if now.get("doing") else ""
        lines.append(Text(f"starting: no round yet{doing}"))
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(found).items():
        table.add_row(Text(name, style="dim"), Text(value))
    lines.append(table)
    if found.state in SAID:
        lines.append(Text(SAID[found.state].format(run=shlex.quote(str(run_dir)))))
    lines += [Text(f"note: {note}", style="dim") for note in now.get("notes", [])]
    return Group(*lines)


def _bars(now: dict[str, Any], *, goes_on: bool) -> Table:
    bars = Table.grid(padding=(0, 1))
    share, clients, done = now.get("share_done") or 0.0, now.get("clients") or 0, now.get("clients_done") or 0
    low_s, high_s = now.get("left_low_s"), now.get("left_high_s")
    ahead = f", {time_left(low_s, high_s)}" if goes_on and low_s is not None and high_s is not None else ""
    bars.add_row("run", ProgressBar(total=1.0, completed=share, width=40), f"{share:.0%}{ahead}")
    bars.add_row(
        "round", ProgressBar(total=max(clients, 1), completed=done, width=40), f"{done}/{clients} clients done"
    )
    return bars


def _place(now: dict[str, Any]) -> str:
    named = who(now.get("cell", ""), now.get("seed", 0), now.get("method", ""), now.get("request", ""))
    score = ""
    if "test_accuracy" in now:
        scored, round_number = now.get("scored_round"), now.get("round_number")
        which = f"round {scored:.0f}: " if scored is not None and scored != round_number else ""
        score = f"   {which}{percent_scores(now)}, {now.get('round_s', 0.0):.1f} s"
    return f"{named} {now['phase']} {now.get('round_number')}/{now.get('rounds')}{score}"


def _facts(found: Status) -> dict[str, str]:
    now = found.progress
    facts = {"started": found.started_at}
    if now:
        facts["requests served"] = f"{now.get('tasks_done', 0)} of {now.get('tasks', 0)}"
        facts["actors replaced"] = str(now.get("actors_replaced", 0))
    if found.peak_memory_bytes:
        nodes = f", on {found.nodes} nodes" if found.nodes > 1 else ""
        facts["memory"] = f"{found.peak_memory_bytes / 1e9:.1f} GB in the largest client process{nodes}"
    if found.state == "running" and found.age_s is not None and found.age_s > STALE_S:
        facts["last heard of"] = f"{duration(found.age_s)} ago"
    return facts
