"""``qdsim status`` and ``qdsim top``: a run as its files show it, from any machine that sees them."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qdsim.api.display import duration, percent_scores, who
from qdsim.experiment import status
from qdsim.experiment.status import Status
from qdsim.store.storage import StoragePath

STALE_S = 300.0
LOOK_EVERY_S = 2.0
SAID = {
    "gone": "no live process owns this run: qdsim resume RUN continues from its last commit",
    "interrupted": "qdsim resume RUN continues from its last commit",
    "failed": "qdsim resume RUN continues from its last commit, once the cause is fixed",
}


def print_status(console: Console, run_dir: StoragePath) -> None:
    """Print where a run is, once."""
    console.print(_screen(status.read(run_dir)), soft_wrap=True)


def top(console: Console, run_dir: StoragePath, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show where a run is until it is over."""
    found = status.read(run_dir)
    with Live(_screen(found), console=console, auto_refresh=False) as live:
        while found.state == "running":
            sleep(LOOK_EVERY_S)
            found = status.read(run_dir)
            live.update(_screen(found), refresh=True)


def _screen(found: Status) -> RenderableType:
    colour = {"done": "green", "running": "bold", "failed": "red", "gone": "red"}.get(found.state, "yellow")
    lines: list[RenderableType] = [Text.assemble(f"{found.run_id}  ", (found.state, colour), f"  {found.error}")]
    now = found.progress
    if now.get("phase"):
        lines.append(_bars(now))
        lines.append(Text(_place(now)))
    elif found.state == "running":
        lines.append(Text("starting: no round yet"))
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(found).items():
        table.add_row(Text(name, style="dim"), Text(value))
    lines.append(table)
    if found.state in SAID:
        lines.append(Text(SAID[found.state]))
    lines += [Text(f"note: {note}", style="dim") for note in now.get("notes", [])]
    return Group(*lines)


def _bars(now: dict[str, Any]) -> Table:
    bars = Table.grid(padding=(0, 1))
    share, clients, done = now.get("share_done") or 0.0, now.get("clients") or 0, now.get("clients_done") or 0
    left = now.get("left_s")
    ahead = f", {duration(left)} left" if left is not None else ""
    bars.add_row("run", ProgressBar(total=1.0, completed=share, width=40), f"{share:.0%}{ahead}")
    bars.add_row(
        "round", ProgressBar(total=max(clients, 1), completed=done, width=40), f"{done}/{clients} clients done"
    )
    return bars


def _place(now: dict[str, Any]) -> str:
    named = who(now.get("cell", ""), now.get("seed", 0), now.get("method", ""), now.get("request", ""))
    score = f"   {percent_scores(now)}, {now.get('round_s', 0.0):.1f} s" if "test_accuracy" in now else ""
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
