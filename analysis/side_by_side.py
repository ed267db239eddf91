"""Any runs of the report beside each other: the settings in which they differ, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis import by_method, style, verdict
from analysis.load import Results, differing, value_text
from analysis.outputs import text
from qdsim.store.run_directory import flat

NO_SETTINGS = {"about", "name"}
NO_RUN = "–"
MOST_NAMED = 6
"""Settings that the table of the runs names; the others are in the comparison."""


@dataclass(frozen=True)
class Comparison:
    """A column for each run; on the page one chooses which."""

    runs: list[str]
    """Run ids."""
    settings: list[tuple[str, list[str]]]
    """Keys in which any two runs differ, each with its value in every run."""
    groups: list[tuple[str, list[tuple[str, str, list[str]]]]]
    """For each request and point of a sweep: method, measure, and its value in every run; empty where it has none."""
    chosen: list[str]
    """Those that the page begins with."""


def make(results: Results) -> Comparison | None:
    """Set all runs beside each other, newest last; None of a single one."""
    runs = [str(run) for run in results.runs.sort_values("started", kind="stable")["run_id"]]
    if len(runs) < 2:
        return None
    configs = [_config(results.manifests[run]) for run in runs]
    settings = [(key, [_value(config, key) for config in configs]) for key in differing(configs)]
    found: dict[tuple[str, str], dict[tuple[str, str], dict[str, str]]] = {}
    for run in runs:
        judged = verdict.make(results.only([run]), "", "")
        if judged.table is None:
            continue
        heads = {column.key: column for column in judged.table.columns}
        for figure in judged.table.figures.to_dict("records"):
            column = heads[figure["column"]]
            group = found.setdefault((str(figure["asked"]), str(figure["cell"])), {})
            own = group.setdefault((style.method(figure["method"]), column.head), {})
            own[run] = _figure(column.kind, figure)
    groups = []
    for (asked, cell), rows in found.items():
        title = " · ".join(filter(None, (by_method.request_words(asked), by_method.cell_words(cell))))
        order = list(dict.fromkeys(method for method, _ in rows))
        lines = [(method, head, [values.get(run, "") for run in runs]) for (method, head), values in rows.items()]
        groups.append((title, sorted(lines, key=lambda line: order.index(line[0]))))
    return Comparison(runs, settings, groups, _chosen(results.runs, runs))


def apart_in_job(results: Results) -> dict[str, list[str]]:
    """Return for each run what tells it from the other runs of its job, as settings; nothing of a job's only run."""
    found: dict[str, list[str]] = {}
    for _, group in results.runs.groupby("job", sort=False):
        configs = {str(run): _config(results.manifests[run]) for run in group["run_id"]}
        keys = differing(list(configs.values()))
        more = [f"{len(keys) - MOST_NAMED} more"] if len(keys) > MOST_NAMED else []
        for run, config in configs.items():
            found[run] = [f"{key} = {_value(config, key)}" for key in keys[:MOST_NAMED]] + more if keys else []
    return found


def _config(manifest: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(manifest.get("config") or {}).items() if key not in NO_SETTINGS}


def _value(config: dict[str, Any], key: str) -> str:
    return value_text(config[key]) if key in config else NO_RUN


def _figure(kind: str, figure: dict[Any, Any]) -> str:
    spread = "" if pd.isna(figure["sd"]) else f" ± {text(kind, float(figure['sd'])).strip('+×')}"
    return f"{text(kind, float(figure['mean']))}{spread}"


def _chosen(table: pd.DataFrame, runs: Sequence[str]) -> list[str]:
    """Return the two newest runs of the job that has most, or of all where no job has two."""
    jobs = dict(zip(table["run_id"].astype(str), table["job"], strict=True))
    most = max(dict.fromkeys(jobs.values()), key=lambda job: list(jobs.values()).count(job))
    own = [run for run in runs if jobs[run] == most]
    return (own if len(own) > 1 else list(runs))[-2:]
