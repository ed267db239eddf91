"""Figures of any sweep: each measure against the swept key; of two keys a map in colours."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Figure, text

MEASURES = {
    "final.forget_accuracy": ("F-Set accuracy (%)", "percent"),
    "final.retain_accuracy": ("R-Set accuracy (%)", "percent"),
    "total.client_compute_s": ("client compute (s)", "seconds"),
}
LOG_FROM = 20.0
"""The largest value over the smallest from which on an axis is logarithmic."""
MOST_ON_MAP = 12
"""Values of a key up to which each square has its figure written into it."""


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make the figure of a sweep over one key, or the maps of one over two; of more keys, the first two are shown."""
    outcomes = compare.outcomes(results)
    if outcomes.empty or set(outcomes["cell"]) == {""}:
        return []
    if results.runs["sound"].all():
        outcomes, _ = compare.paired(outcomes)
    return figures(outcomes.dropna(subset=["total.client_compute_s"]), stem, title, notes)


def figures(outcomes: pd.DataFrame, stem: str, title: str, notes: list[str]) -> list[Figure]:
    """Make the figure of outcomes over a sweep."""
    cells = {cell: dict(by_method.cell_settings(cell)) for cell in dict.fromkeys(outcomes["cell"])}
    values = {
        key: _ordered({found[key] for found in cells.values() if key in found})
        for key in dict.fromkeys(k for c in cells.values() for k in c)
    }
    keys = [key for key, found in values.items() if len(found) > 1]
    if not keys:
        return []
    shown: list[str] = []
    for key in keys[2:]:
        first = values[key][0]
        outcomes = outcomes[outcomes["cell"].map(lambda cell, k=key, v=first: cells[cell].get(k) == v).astype(bool)]
        shown.append(f"shown: {key} = {first}, the first of {len(values[key])}")
    outcomes, first_request = by_method.first_of(outcomes, "asked")
    shown += first_request
    for key in keys[:2]:
        outcomes = outcomes.assign(**{key: outcomes["cell"].map(lambda cell, k=key: cells[cell].get(k))})
    asked = by_method.request_words(str(outcomes["asked"].iloc[0])).lower()
    said = [
        f"after unlearning and recovery; {asked}",
        *shown,
        *notes,
    ]
    if len(keys) == 1:
        draw = partial(_lines, outcomes, keys[0], values[keys[0]])
        return [Figure(stem, title, draw, [*said, "mean and standard deviation over seeds"])]
    rows, columns = keys[:2]
    draw = partial(_maps, outcomes, (rows, values[rows]), (columns, values[columns]))
    return [Figure(stem, title, draw, [*said, "means over seeds"])]


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return float("nan")


def _ordered(values: set[str]) -> list[str]:
    """Sort numbers by size, and other values as they are written."""
    return sorted(values, key=lambda value: (np.isnan(_number(value)), np.nan_to_num(_number(value)), value))


def _lines(outcomes: pd.DataFrame, key: str, values: list[str]) -> mpl_figure.Figure:
    drawn, axes = style.figure(style.TEXT_WIDTH + 2, 2.7, 1, len(MEASURES))
    numbers = [_number(value) for value in values]
    measured = not np.isnan(numbers).any()
    places = dict(zip(values, numbers if measured else range(len(values)), strict=True))
    for axis, (column, (label, kind)) in zip(axes, MEASURES.items(), strict=True):
        for method in style.method_order(outcomes["method"]):
            own = outcomes[outcomes["method"] == method]
            means = own.groupby(own[key].map(places))[column].agg(["mean", "std"]).sort_index()
            color, marker = style.method_style(method)
            axis.errorbar(means.index, means["mean"], yerr=style.spread(means["std"]), color=color, marker=marker,
                          label=style.method(method), capsize=2)  # fmt: skip
        _axis_of(axis, key, values, numbers if measured else None)
        if kind == "percent":
            style.percent_axis(axis, label.removesuffix(" (%)"))
        else:
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
    style.legend(drawn, axes)
    return drawn


def _axis_of(axis: Axes, key: str, values: list[str], numbers: list[float] | None) -> None:
    """Make the axis of the swept values: logarithmic where they span much, by name where they are no numbers."""
    if numbers is None:
        axis.set_xticks(range(len(values)), [_short(value) for value in values])
        axis.set_xlabel(key)
        axis.margins(x=0.2)
    elif min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_FROM:
        style.log_axis(axis, "x", key)
    else:
        axis.set_xlabel(key)
        if len(values) <= 6:
            axis.set_xticks(numbers, values)
        axis.margins(x=0.1)


def _short(value: str) -> str:
    return value if len(value) <= 14 else f"{value[:13]}…"


def _maps(outcomes: pd.DataFrame, rows: tuple[str, list[str]], columns: tuple[str, list[str]]) -> mpl_figure.Figure:
    """Draw a row of maps for each method, a map for each measure, on one scale over all methods."""
    methods = style.method_order(outcomes["method"])
    row_key, row_values = rows
    column_key, column_values = columns
    written = max(len(row_values), len(column_values)) <= MOST_ON_MAP
    height = max(1.5, 0.32 * len(row_values) + 0.95) * len(methods) + 0.3
    drawn, axes = style.figure(style.TEXT_WIDTH + 2, height, len(methods), len(MEASURES))
    for j, (measure, (label, kind)) in enumerate(MEASURES.items()):
        tables = [_square(outcomes[outcomes["method"] == m], measure, rows, columns) for m in methods]
        least, most = (
            float(f([f(t) for t in tables if np.isfinite(t).any()] or [0.0])) for f in (np.nanmin, np.nanmax)
        )
        for i, (method, table) in enumerate(zip(methods, tables, strict=True)):
            axis = axes[i * len(MEASURES) + j]
            axis.imshow(table, aspect="auto", cmap="Blues", vmin=least, vmax=max(most, least + 1e-9))
            axis.grid(visible=False)
            axis.set_xticks(range(len(column_values)), [_short(value) for value in column_values])
            axis.set_yticks(range(len(row_values)), [_short(value) for value in row_values] if j == 0 else [])
            axis.set_title(f"{style.method(method)}: {label}")
            if i == len(methods) - 1:
                axis.set_xlabel(column_key)
            if j == 0:
                axis.set_ylabel(row_key)
            if written:
                _write(axis, table, kind, least + 0.6 * (most - least))
    return drawn


def _square(
    own: pd.DataFrame, measure: str, rows: tuple[str, list[str]], columns: tuple[str, list[str]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    means = own.pivot_table(index=rows[0], columns=columns[0], values=measure, aggfunc="mean")
    found: np.ndarray[Any, np.dtype[np.float64]] = means.reindex(index=rows[1], columns=columns[1]).to_numpy(float)
    return found


def _write(axis: Axes, table: np.ndarray[Any, np.dtype[np.float64]], kind: str, dark_from: float) -> None:
    for (i, j), value in np.ndenumerate(table):
        if np.isfinite(value):
            said = f"{100 * value:.1f}" if kind == "percent" else text(kind, float(value))
            color = "white" if value > dark_from else "black"
            axis.text(j, i, said, ha="center", va="center", fontsize=7, color=color)
