"""Tables with a row per method, as most of the paper's: one builder for all of them."""

import re
from collections.abc import Iterator, Sequence

import pandas as pd

from analysis import compare, style
from analysis.load import Results
from analysis.outputs import Column, Missing, Table

BEFORE = (
    Column("before.forget_accuracy", "F-Set", "Before"),
    Column("before.retain_accuracy", "R-Set", "Before"),
)
FINAL = (
    Column("final.forget_accuracy", "F-Set", "Unlearning + recovery"),
    Column("final.retain_accuracy", "R-Set", "Unlearning + recovery"),
)
RELEARNT = (
    Column("relearn.forget_accuracy", "F-Set", "Relearning"),
    Column("relearn.retain_accuracy", "R-Set", "Relearning"),
)
SPEEDUPS = tuple(Column(f"speedup.{cost}", name, "Speed-up as run", "times") for cost, name in compare.COSTS.items())
CONVERGED = tuple(
    Column(f"converged.{cost}", name, "Speed-up, retraining to convergence", "times")
    for cost, name in compare.COSTS.items()
)
TOTAL_S = Column("total.client_compute_s", "Time", "Cost", "seconds")
SPEEDUP = Column("converged.client_compute_s", "Speed-up", "Cost", "times")


def stage(phase: str, title: str) -> tuple[Column, ...]:
    """Return the columns of one stage in the paper's Table 2."""
    return (
        Column(f"{phase}.forget_accuracy", "F-Set", title),
        Column(f"{phase}.retain_accuracy", "R-Set", title),
        Column(f"{phase}.rounds_run", "Rounds", title, "count"),
        Column(f"{phase}.client_compute_s", "Time", title, "seconds"),
        Column(f"{phase}.data_size", "Data size", title, "count"),
    )


def build(
    stem: str,
    title: str,
    outcomes: pd.DataFrame,
    columns: Sequence[Column],
    where: str | None,
    notes: Sequence[str] = (),
) -> Table:
    """Summarize outcomes over seeds, beside the paper's values of ``where``, in the order of the paper's tables."""
    rows = ["cell", "asked", "method"]
    outcomes = outcomes.astype({name: str for name in rows})
    summary = compare.summarize(outcomes, rows, [column.key for column in columns])
    summary = compare.beside_paper(summary, where)
    cells, asked = list(dict.fromkeys(outcomes["cell"])), sorted(set(outcomes["asked"]), key=_position)
    methods = style.method_order(outcomes["method"])
    order = [{name: i for i, name in enumerate(names)} for names in (cells, asked, methods)]
    ranks = [summary[name].map(place) for name, place in zip(rows, order, strict=True)]
    places = pd.DataFrame(dict(zip(rows, ranks, strict=True))).sort_values(rows, kind="stable")
    summary = summary.loc[places.index]
    summary["row"] = [
        " · ".join(
            part
            for part in (
                cell if len(cells) > 1 else "",
                request if len(asked) > 1 else "",
                style.method(method),
            )
            if part
        )
        for cell, request, method in summary[rows].itertuples(index=False)
    ]
    kept = [*rows, "row", "column", "mean", "sd", "n", "paper", "difference"]
    used = [column for column in columns if (summary["column"] == column.key).any()]
    return Table(stem, title, used, summary[kept].reset_index(drop=True), notes=list(notes))


def _position(request: str) -> tuple[int, str]:
    position = request.split(":")[0]
    return (int(position), "") if position.isdigit() else (0, request)


def settings(results: Results, job: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield each setting that a job was run in, newest first: stem, description, and its sound runs."""
    runs = results.runs[(results.runs["job"] == job) & results.runs["sound"]] if len(results.runs) else results.runs
    if runs.empty:
        raise Missing(f"qdsim run jobs/{job}.toml")
    groups = sorted(runs.groupby("setting"), key=lambda item: max(item[1]["run_id"]), reverse=True)
    telling = [name for name in ("dataset", "profile", "split", "clients") if runs[name].nunique() > 1]
    seen: dict[str, int] = {}
    for _, group in groups:
        first = group.iloc[0]
        words = [str(first[name]) or "full" for name in telling]
        stem = "-".join([job, *(re.sub(r"[^A-Za-z0-9.]+", "", word) for word in words)])
        seen[stem] = seen.get(stem, 0) + 1
        if seen[stem] > 1:
            stem = f"{stem}-{seen[stem]}"
        yield stem, describe(first), group


def describe(run: pd.Series) -> str:
    """Say in a few words what was run."""
    profile = f", profile {run['profile']}" if run["profile"] else ""
    return f"{style.dataset(run['dataset'])}, {run['clients']} clients, {run['split']}{profile}"


def warnings(results: Results, runs: pd.DataFrame) -> list[str]:
    """Return what must be said under figures of these runs."""
    found = []
    if (runs["profile"] == "smoke").any():
        found.append("profile smoke: these numbers show that the job runs, and mean nothing else")
    for run_id in runs["run_id"]:
        note = (results.manifests[run_id].get("data") or {}).get("note")
        if note and note not in found:
            found.append(note)
    return found


def tables(
    results: Results,
    job: str,
    title: str,
    columns: Sequence[Column],
    paper: dict[str, str],
    notes: Sequence[str] = (),
) -> list[Table]:
    """Make a job's table for each setting; ``paper`` names the paper's table for a data set."""
    made = []
    for stem, what, runs in settings(results, job):
        outcomes = compare.outcomes(results, job)
        outcomes = outcomes[outcomes["setting"].isin(runs["setting"])]
        outcomes, left_out = compare.paired(outcomes)
        where = paper.get(runs.iloc[0]["dataset"])
        said = [*notes, *left_out, *warnings(results, runs)]
        made.append(build(stem, f"{title} ({what})", outcomes, columns, where, said))
    return made
