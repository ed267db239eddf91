"""What ``qdsim plan`` prints, and what :func:`qdsim.plan` returns."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from qdsim.planning import estimate, units
from qdsim.planning.estimate import PhaseTime
from qdsim.planning.planner import ASSUMED_FLOPS, HIGH_SHARE, LOW_SHARE, PlanReport

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 120


@dataclass(frozen=True, repr=False)
class JobPlan:
    """A job that fits: where its clients are placed, and how long it takes. Printed, it is what the command prints."""

    report: PlanReport
    is_assumed: bool
    """The speed of its GPUs was not measured."""

    @property
    def total_s(self) -> float:
        """Wall-clock time of the whole job."""
        return estimate.total_s(self.report.times)

    @property
    def range_s(self) -> tuple[float, float]:
        """The same at the least and at the most."""
        return estimate.range_s(self.report.times, self.report.within)

    @property
    def storage_bytes(self) -> int:
        """What its run directory comes to."""
        return self.report.storage_bytes

    @property
    def phases(self) -> pd.DataFrame:
        """One row for a method's phase, over all seeds, cells and requests."""
        import pandas as pd

        rows = [
            {
                "method": method,
                "phase": phase,
                "times": len(times),
                "rounds": max(time.rounds for time in times),
                "waves": max(time.waves for time in times),
                "wall_s": sum(time.wall_s for time in times),
                "low_s": sum(time.low_s for time in times),
                "high_s": sum(time.high_s for time in times),
            }
            for (method, phase), times in _grouped(self.report.times).items()
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        """Return what ``qdsim plan`` prints."""
        console = Console(file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False, force_terminal=False)
        print_plan_report(console, self.report, assumed=self.is_assumed)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def print_plan_report(console: Console, found: PlanReport, *, assumed: bool) -> None:
    """Print where clients are placed, and how long each phase takes."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    plan, layout = found.plan, found.layout
    packed = max(len(group) for group in layout.clients)
    say(f"{plan.job.name}: {plan.max_clients} clients on {found.machines.described}")
    say(f"it fits: {layout}, {packed} client{'s' if packed > 1 else ''} in an actor")
    of_gpu = f"about {units.size(found.gpu_bytes)} of GPU memory for an actor"
    say(of_gpu if layout.gpus else "no GPUs: clients run on CPUs")
    nodes = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("node", "CPUs", "GPUs", "memory (GB)", "actors that fit"):
        nodes.add_column(name, justify="left" if name == "node" else "right")
    for row in layout.table(found.machines.nodes):
        nodes.add_row(*row)
    console.print(nodes)
    if found.packings:
        console.print(_packings(found))
        say(
            "the bits are the same; fewer processes leave more memory and cores, more of them fill each other's gaps: "
            "without CUDA MPS kernels of different processes take turns"
        )
    console.print(_phases(found))
    low_s, high_s = estimate.range_s(found.times, found.within)
    held = ""
    if found.gpus:
        held = f", {units.hours(low_s * found.gpus)} to {units.hours(high_s * found.gpus)} GPU-hours"
    say(f"in all {units.time_range(low_s, high_s)}{held}, {units.size(found.storage_bytes)} of storage")
    say(_basis(found, assumed=assumed))
    for note in [*found.notes, "training that lies in --out already is not done again, and not in this"]:
        say(f"note: {note}")


def _basis(found: PlanReport, *, assumed: bool) -> str:
    """Say what the times rest on."""
    if found.measured is not None:
        return f"measured by qdsim doctor on {found.measured.gpu}: other networks in proportion to their operations"
    if not assumed:
        known = "" if found.layout.gpus else "; runs on cores were within 30 % of their plans"
        return f"measured: a few steps of one client{known}"
    model = found.machines.model
    if model is None:
        low, high = (ASSUMED_FLOPS / factor / 1e12 for factor in reversed(found.within.costs))
        return (
            f"assumed, not measured: {low:g} to {high:g} TFLOP/s a GPU; name it with --gpu, or have it measured there "
            "with --address"
        )
    return (
        f"assumed, not measured: {100 * LOW_SHARE:g} to {HIGH_SHARE:.0%} of the {model.tflops:g} TFLOP/s (float32) and "
        f"{model.bandwidth_gb_s:,g} GB/s that its maker states ({model.source}); with --address it is measured there"
    )


def _packings(found: PlanReport) -> Table:
    """One line for each way of sharing GPUs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    names = ("clients_per_actor", "processes a GPU", "clients each", "for CUDA", "in all", "cores")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for way in found.packings:
        sizes = units.size(way.context_bytes), units.size(way.memory_bytes)
        table.add_row(way.name, str(way.on_a_gpu), str(way.clients), *sizes, f"{way.cores:g}")
    return table


def _phases(found: PlanReport) -> Table:
    """One line for a method's phase, over all seeds, cells and requests."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("method", "phase", "times", "rounds", "waves", "time", "GPU time"):
        table.add_column(name, justify="left" if name in ("method", "phase") else "right", no_wrap=True)
    for (method, phase), times in _grouped(found.times).items():
        low_s, high_s = (sum(getattr(time, end) for time in times) for end in ("low_s", "high_s"))
        waves = max(time.waves for time in times)
        table.add_row(
            method,
            phase,
            str(len(times)),
            str(max(time.rounds for time in times)),
            str(waves),
            units.time_range(low_s, high_s),
            units.time_range(low_s * found.gpus, high_s * found.gpus) if found.gpus else "-",
        )
    return table


def _grouped(times: Iterable[PhaseTime]) -> dict[tuple[str, str], list[PhaseTime]]:
    groups: dict[tuple[str, str], list[PhaseTime]] = {}
    for time in times:
        groups.setdefault((time.method, time.phase), []).append(time)
    return groups
