"""What the figures over a swept setting share."""

import pandas as pd
from matplotlib.axes import Axes

from analysis import compare
from analysis.load import Results
from analysis.outputs import Column, Table


def with_swept(outcomes: pd.DataFrame, key: str) -> pd.DataFrame:
    """Add ``swept``: the number that a cell's name gives for a key."""
    found = outcomes["cell"].astype(str).str.extract(rf"{key}=([^,]+)")[0]
    return outcomes.assign(swept=pd.to_numeric(found, errors="coerce")).dropna(subset="swept")


def reference(results: Results, outcomes: pd.DataFrame, method: str) -> float | None:
    """Return a method's mean final R-Set accuracy over the same seeds, partitions, data, model and requests.

    It may come from another job, so long as that one trained the same federation.
    """
    wanted = {_federation(results, str(run)) for run in results.runs["run_id"] if _in(results, run, outcomes)}
    others = compare.outcomes(results)
    runs = [str(run) for run in results.runs["run_id"] if _federation(results, str(run)) in wanted]
    allowed = set(results.runs.loc[results.runs["run_id"].isin(runs), "setting"])
    others = others[(others["method"] == method) & others["setting"].isin(allowed)]
    same = ["partition", "seed", "asked"]
    pairs = outcomes[same].astype(str).drop_duplicates()
    values = others.astype({name: str for name in same}).merge(pairs, on=same)["final.retain_accuracy"]
    return float(values.mean()) if len(values) else None


def _in(results: Results, run: str, outcomes: pd.DataFrame) -> bool:
    settings = results.runs.set_index("run_id")["setting"]
    return settings[run] in set(outcomes["setting"])


def _federation(results: Results, run: str) -> str:
    config = results.manifests[run].get("config") or {}
    data = config.get("data") or {}
    return repr([data.get("dataset"), data.get("size"), config.get("model"), config.get("train")])


def sweep_table(
    stem: str,
    title: str,
    outcomes: pd.DataFrame,
    columns: tuple[Column, ...],
    where: str,
    row_label: str,
    notes: list[str],
) -> Table:
    """Return a table with a row for each swept value."""
    by = ["swept"]
    summary = compare.summarize(outcomes, by, [column.key for column in columns]).sort_values("swept", kind="stable")
    summary["row"] = [f"{value:g}" for value in summary["swept"]]
    cifar = set(outcomes["dataset"].astype(str)) == {"cifar10"}
    summary = compare.beside_paper(summary, where if cifar else None, row="row")
    used = [column for column in columns if (summary["column"] == column.key).any()]
    return Table(stem, title, used, summary.reset_index(drop=True), row_label, notes)


def zoomed(axes: Axes, label: str) -> None:
    """Show fractions as percentages, on the range that occurs."""
    axes.margins(y=0.15)
    least, most = axes.get_ylim()
    digits = 0 if most - least > 0.05 else 1
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.{digits}f}")
    axes.set_ylabel(f"{label} (%)")
