"""What the figures over a swept setting share."""

import re
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Missing, Table


def with_swept(outcomes: pd.DataFrame, key: str, method: str | None = "quickdrop") -> tuple[pd.DataFrame, list[str]]:
    """Add ``swept``, the number in a cell's name for a key; keep one method, request and point of other keys."""
    cell = outcomes["cell"].astype(str)
    number = pd.to_numeric(cell.str.extract(rf"(?:^|,){re.escape(key)}=([^,]+)")[0], errors="coerce")
    rest = cell.str.replace(rf"(?:^|,){re.escape(key)}=[^,]+", "", regex=True)
    outcomes = outcomes.assign(swept=number, rest=rest).dropna(subset="swept")
    if method is not None:
        outcomes = outcomes[outcomes["method"] == method]
    if outcomes.empty:
        raise Missing(f"a run with {key} in its sweep")
    return by_method.first_of(outcomes, "rest", "asked")


def reference(
    results: Results, outcomes: pd.DataFrame, method: str, sections: Sequence[str]
) -> tuple[float | None, int]:
    """Return a method's mean final R-Set accuracy over the same seeds, partitions and requests, and over how many.

    It may come from another job, so long as these sections of both jobs are the same.
    """
    settings = {_fixed(results, run, sections) for run in outcomes["run_id"]}
    others = compare.outcomes(results.sound)
    others = others[(others["method"] == method) & (others["cell"] == "")]
    others = others[others["run_id"].map(lambda run: _fixed(results, run, sections) in settings).astype(bool)]
    same = ["dataset", "partition", "seed", "request"]
    values = others.drop_duplicates(same, keep="last").merge(outcomes[same].drop_duplicates(), on=same)
    return (float(values["final.retain_accuracy"].mean()) if len(values) else None), len(values)


def same_federation(results: Results, outcomes: pd.DataFrame, method: str, sections: Sequence[str]) -> pd.DataFrame:
    """Return a method's outcomes for the same seeds, partitions and requests, whatever job they come from.

    ``until.<cost>`` are its costs up to the round in which it had converged. These sections of the jobs, and the
    hardware, are the same.
    """

    def alike(run: str) -> str:
        return _fixed(results, run, sections) + repr(results.manifests[run].get("hardware"))

    settings = {alike(run) for run in outcomes["run_id"]}
    sound = results.sound
    others = compare.outcomes(sound)
    others = others[(others["method"] == method) & (others["cell"] == "")]
    others = others[others["run_id"].map(lambda run: alike(run) in settings).astype(bool)]
    same = ["dataset", "partition", "seed", "request"]
    others = others.drop_duplicates(same, keep="last").merge(outcomes[same].drop_duplicates(), on=same)
    stages = sound.stages.astype({name: str for name in ("run_id", *compare.SAME, "method", "phase") if name != "seed"})
    until = compare.converged_costs(sound, stages).rename(columns={cost: f"until.{cost}" for cost in compare.COSTS})
    return others.merge(until, on=["run_id", *compare.SAME], how="left")


def _fixed(results: Results, run: str, sections: Sequence[str]) -> str:
    config = results.manifests[run].get("config") or {}
    return repr([config.get(section) for section in sections])


def sweep_table(
    stem: str,
    title: str,
    outcomes: pd.DataFrame,
    columns: Sequence[Column],
    where: str | None,
    row_label: str,
    notes: Sequence[str],
) -> Table:
    """Return a table with a row for each swept value."""
    summary = compare.summarize(outcomes, ["swept"], [c.key for c in columns]).sort_values("swept", kind="stable")
    summary["row"] = [f"{value:g}" for value in summary["swept"]]
    summary = compare.beside_paper(summary, where, row="row")
    used = [column for column in columns if (summary["column"] == column.key).any()]
    return Table(stem, title, used, summary.reset_index(drop=True), row_label, notes)


def accuracy_panel(
    axes: Axes, outcomes: pd.DataFrame, where: str | None, line: float | None, other: str, name: str
) -> None:
    """Draw R-Set accuracy after recovery against the swept values, another method's as a line, and the paper's."""
    means = outcomes.groupby("swept")["final.retain_accuracy"].agg(["mean", "std"])
    color = style.METHODS["quickdrop"].color
    errors = style.spread(means["std"])
    axes.errorbar(means.index, means["mean"], yerr=errors, marker="o", color=color, capsize=2, label="QuickDrop")
    if line is not None:
        axes.axhline(line, color=style.method_style(other).color, ls="--", lw=1, label=name)
    if where:
        values = [(v, compare.paper_value(where, f"{v:g}", "final.retain_accuracy")) for v in means.index]
        known = [(v, p) for v, p in values if p is not None]
        axes.scatter(
            [v for v, _ in known], [p for _, p in known], marker="o", facecolor="none", color="#777777", label="paper"
        )
    axes.margins(y=0.15)
    style.as_percent(axes.yaxis)
    axes.set_ylabel("R-Set accuracy (%)")
    axes.legend()
