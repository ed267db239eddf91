"""What ``qdsim bench`` measured: the table of ratios with their aims, and a figure of each benchmark."""

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes

from analysis import style
from analysis.outputs import Figure
from qdsim.errors import BadInput

COLORS = {
    "qdsim": "#D55E00",
    "qdsim compiled": "#E69F00",
    "qdsim with Winograd": "#CC79A7",
    "bare PyTorch": "#555555",
    "Flower": "#56B4E9",
}
OTHER = "#009E73"
LABEL_WIDTH = 13
"""Characters in a line under a bar."""


def load(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Return what was measured, the ratios, and a line on the machine."""
    try:
        measured, ratios = (pq.read_table(folder / f"{name}.parquet") for name in ("measured", "ratios"))
    except (OSError, pa.ArrowException):
        raise BadInput("BENCH", str(folder), "holds no measured.parquet and ratios.parquet of qdsim bench") from None
    said = {key.decode(): value.decode() for key, value in (ratios.schema.metadata or {}).items() if b"\n" not in value}
    machine = ", ".join(f"{key} {said[key]}" for key in ("cpus", "machine", "python", "torch", "ray") if key in said)
    return measured.to_pandas(), ratios.to_pandas(), machine


def markdown(ratios: pd.DataFrame, machine: str) -> str:
    """Return the table of ratios."""
    lines = ["| benchmark | case | figure | measured | aim | |", "| --- | --- | --- | ---: | ---: | --- |"]
    rows: list[Any] = ratios.to_dict("records")
    for row in rows:
        aim = "" if pd.isna(row["aim"]) else f"{'≥' if row['at_least'] else '≤'} {row['aim']:g}"
        met = {True: "met", False: "**not met**"}.get(row["met"], "")
        value = f"{row['value']:.3g} {row['unit']}"
        lines.append(f"| {row['benchmark']} | {row['case']} | {row['text']} | {value} | {aim} | {met} |")
    return "\n".join([*lines, "", f"Measured in one run on one machine ({machine}).", ""])


def figures(measured: pd.DataFrame) -> list[Figure]:
    """Return a figure of each benchmark that has several numbers to compare."""
    drawers: dict[str, Callable[[pd.DataFrame], mpl_figure.Figure]] = {
        "throughput": partial(_bars, label="samples per second"),
        "overhead": partial(_bars, label="ms per client update"),
        "startup": _stacked,
        "matching": _matching,
        "scaling": _lines,
        "gpu-counts": _counts,
    }
    found = []
    for name, draw in drawers.items():
        own = measured[measured["benchmark"] == name]
        if len(own):
            found.append(Figure(f"bench_{name}", name, partial(draw, own), []))
    return found


def _bars(own: pd.DataFrame, label: str) -> mpl_figure.Figure:
    """One group of bars a case, one bar a side."""
    cases = own["case"].unique()
    drawn, axes = style.figure(style.COLUMN_WIDTH * max(1, len(cases)) / 1.4 + 1, 2.6, columns=len(cases))
    for axis, case in zip(axes, cases, strict=True):
        values = own[own["case"] == case].set_index("side")["value"]
        sides = [str(side) for side in values.index]
        bars = axis.bar(range(len(sides)), values, color=[COLORS.get(side, OTHER) for side in sides])
        axis.bar_label(bars, fmt=_number, fontsize=8, padding=2)
        axis.margins(y=0.15)
        axis.set_xticks(range(len(sides)), [textwrap.fill(side, LABEL_WIDTH) for side in sides])
        axis.set_title(case)
        axis.grid(visible=False, axis="x")
    axes[0].set_ylabel(label)
    return drawn


def _stacked(own: pd.DataFrame) -> mpl_figure.Figure:
    """The whole way to the first round, and for ours what it is made of."""
    whole = own[own["quantity"] == "to the end of the first round"].set_index("side")["value"]
    parts = own[own["quantity"] != "to the end of the first round"]
    drawn, (axis,) = style.figure(style.TEXT_WIDTH, 1.2 + 0.4 * (len(whole) + parts["side"].nunique()))
    names, place = [], 0
    shades = style.CLASS_COLORS
    for side in parts["side"].unique()[::-1]:
        left = 0.0
        rows = parts[parts["side"] == side]
        for i, (part, part_s) in enumerate(zip(rows["quantity"], rows["value"], strict=True)):
            axis.barh(place, part_s, left=left, color=shades[i], label=part if not place else None)
            left += part_s
        names.append(f"{side}: parts")
        place += 1
    for side, value in whole[::-1].items():
        bar = axis.barh(place, value, color=COLORS.get(str(side).split(",")[0], OTHER))
        axis.bar_label(bar, fmt="{:.1f} s", fontsize=8, padding=2)
        names.append(str(side))
        place += 1
    axis.set_yticks(range(place), names)
    axis.margins(x=0.1)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("seconds from the command")
    style.legend(drawn, [axis])
    return drawn


def _matching(own: pd.DataFrame) -> mpl_figure.Figure:
    """Training with matching against training without, all clients and the largest."""
    drawn, (axis,) = style.figure(style.TEXT_WIDTH, 2.8)
    cases = own["case"].unique()
    kinds = {"compute of all clients": "all clients", "compute of the largest client": "the largest client"}
    for shift, (quantity, label) in enumerate(kinds.items()):
        table = own[own["quantity"] == quantity].pivot(index="case", columns="side", values="value").reindex(cases)
        ratio = table["with matching"] / table["without matching"]
        places = [i + 0.4 * shift - 0.2 for i in range(len(cases))]
        bars = axis.bar(places, ratio, width=0.38, color=("#D55E00", "#56B4E9")[shift], label=label)
        axis.bar_label(bars, fmt="{:.2f}", fontsize=8, padding=2)
    axis.axhline(1, color="#555555", linewidth=0.8)
    axis.axhspan(1.9, 2.2, color="#DDDDDD", zorder=0, label="the paper's Table 6")
    axis.set_xticks(range(len(cases)), [case.replace(", ", "\n").replace(" with", "\nwith") for case in cases])
    axis.margins(y=0.12)
    axis.grid(visible=False, axis="x")
    axis.set_ylabel("training with matching\nagainst training without")
    style.legend(drawn, [axis])
    return drawn


def _lines(own: pd.DataFrame) -> mpl_figure.Figure:
    """Seconds of a round against clients, and against actors."""
    drawn, axes = style.figure(style.TEXT_WIDTH, 2.7, columns=2)
    for axis, case in zip(axes, own["case"].unique(), strict=True):
        rows = own[own["case"] == case]
        numbers = rows["side"].str.split().str[0].astype(int)
        unit = rows["side"].str.split().str[1].iloc[0]
        _line(axis, numbers, rows["value"], unit, case)
    return drawn


def _line(axis: Axes, numbers: pd.Series, values: pd.Series, unit: str, case: str) -> None:
    axis.plot(numbers, values, "o-", color=COLORS["qdsim"])
    axis.set(xlabel=unit, ylabel="seconds of a round", title=f"{unit}, {case}")
    if numbers.max() > 50:
        style.log_axis(axis, "x", unit)
        style.log_axis(axis, "y", "seconds of a round")
    else:
        axis.set_xticks(numbers)
        axis.set_ylim(bottom=0)


def _counts(own: pd.DataFrame) -> mpl_figure.Figure:
    """What one more step of each kind asks of a GPU, beside bare PyTorch."""
    own = own[own["case"].str.endswith(": one more step")]
    cases = own["case"].unique()[::-1]
    drawn, axes = style.figure(style.TEXT_WIDTH, 0.9 + 0.24 * len(cases), columns=2)
    for axis, (quantity, label) in zip(
        axes, {"launches": "kernel launches", "GB moved": "GB moved"}.items(), strict=True
    ):
        rows = own[own["quantity"] == quantity].set_index("case").reindex(cases)
        bars = axis.barh(range(len(cases)), rows["value"], color=[COLORS[side] for side in rows["side"]])
        axis.bar_label(bars, fmt=_number, fontsize=8, padding=2)
        style.log_axis(axis, "x", label)
        axis.margins(x=0.2)
        axis.set_yticks(range(len(cases)), [case.removesuffix(": one more step") for case in cases])
        axis.grid(visible=False, axis="y")
    axes[1].tick_params(labelleft=False)
    return drawn


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
