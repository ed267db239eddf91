"""All benchmarks: what ``qdsim bench`` runs, prints and writes."""

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table

from qdsim.bench import gpu_counts, gradients, matching, memory, overhead, scaling, startup, throughput
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.errors import BadInput

ABOUT = {b.NAME: b.ABOUT for b in (throughput, overhead, matching, gradients, startup, memory, scaling, gpu_counts)}


def chosen(names: Iterable[str]) -> list[str]:
    """Return the benchmarks of these names, all where none is given."""
    wanted = list(names) or list(ABOUT)
    for name in wanted:
        if name not in ABOUT:
            raise BadInput("NAME", name, f"allowed: {', '.join(ABOUT)}")
    return wanted


def run(names: list[str], rounds: int, flower: str | None, svhn: str | None, console: Console, out: Path) -> None:
    """Run benchmarks one after the other; what is done is written before the next begins."""
    out.mkdir(parents=True, exist_ok=True)
    found = Found([], [])
    for name in names:
        if name == memory.NAME and svhn is None:
            console.print(f"{name}: left out; it needs --svhn, the folder of SVHN's .mat files", markup=False)
            continue
        ways: dict[str, Callable[[], Found]] = {
            throughput.NAME: partial(throughput.measure, rounds),
            overhead.NAME: partial(overhead.measure, rounds, flower),
            matching.NAME: partial(matching.measure, rounds),
            gradients.NAME: partial(gradients.measure, rounds),
            startup.NAME: partial(startup.measure, rounds, flower),
            memory.NAME: partial(memory.measure, svhn or ""),
            scaling.NAME: partial(scaling.measure, rounds),
            gpu_counts.NAME: gpu_counts.measure,
        }
        console.print(f"{name}: {ABOUT[name]}", markup=False)
        one = ways[name]()
        found = Found([*found.measured, *one.measured], [*found.ratios, *one.ratios])
        write(found, out)
        if name == gpu_counts.NAME:
            for which in (gpu_counts.MORE, gpu_counts.FIRST):
                console.print(wide(one.measured, which))
            console.print(wide(one.measured, gpu_counts.MORE, estimates=True))
        console.print(table(one.ratios))
    if flower is None:
        console.print("without --flower nothing was compared with Flower", markup=False)


def table(ratios: list[Ratio]) -> Table:
    """One line a ratio, with its aim."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("case", "figure", "measured", "aim", ""):
        made.add_column(column, justify="right" if column in ("measured", "aim") else "left")
    for ratio in ratios:
        aim = "" if ratio.aim is None else f"{'≥' if ratio.at_least else '≤'} {ratio.aim:g}"
        said = "" if ratio.met is None else "met" if ratio.met else "not met"
        made.add_row(ratio.case, ratio.text, f"{ratio.value:.3g} {ratio.unit}", aim, said)
    return made


def wide(measured: list[Measured], which: str, estimates: bool = False) -> Table:
    """One line a case whose name ends with ``which``, one column a quantity: those counted, or those estimated."""
    rows = [row for row in measured if row.case.endswith(which) and (row.unit == "ms") == estimates]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column(f"{which}, estimated" if estimates else which, no_wrap=True)
    for quantity in dict.fromkeys(row.quantity for row in rows):
        made.add_column(quantity, justify="right")
    for case in dict.fromkeys(row.case for row in rows):
        values = [row.value for row in rows if row.case == case]
        shown = [f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}" for value in values]
        made.add_row(case.removesuffix(f": {which}"), *shown)
    return made


def write(found: Found, out: Path) -> None:
    """Write both tables; the machine is said in their metadata."""
    machine = {"cpus": str(os.cpu_count()), "machine": platform.machine(), "python": platform.python_version()}
    for package in ("torch", "ray", "numpy"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            continue
    for name, rows in (("measured", found.measured), ("ratios", found.ratios)):
        pq.write_table(_as_table(rows).replace_schema_metadata(machine), out / f"{name}.parquet")


def _as_table(rows: list[Measured] | list[Ratio]) -> pa.Table:
    return pa.Table.from_pylist([asdict(row) | ({"met": row.met} if isinstance(row, Ratio) else {}) for row in rows])
