"""Tables with a row per method, as most of the paper's: one builder for all of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
RELEARNED = (
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
        Column(f"{phase}.converged_round", "to conv.", title, "count"),
        Column(f"{phase}.client_compute_s", "Time", title, "seconds"),
        Column(f"{phase}.data_size", "Data size", title, "count"),
    )


@dataclass(frozen=True)
class Paper:
    """A table of the paper, and the experiment that it is of: only the same one stands beside it."""

    where: str
    datasets: tuple[str, ...]
    clients: int
    split: str

    def covers(self, run: pd.Series) -> bool:
        """Tell whether a run is that experiment, at whatever size but that of a smoke test, and on its real data."""
        same = run["clients"] == str(self.clients) and run["split"] == self.split
        return bool(same and run["dataset"] in self.datasets and not run["caveat"])


def build(
    stem: str,
    title: str,
    outcomes: pd.DataFrame,
    columns: Sequence[Column],
    where: str | None,
    notes: Sequence[str] = (),
) -> Table:
    """Summarize outcomes over seeds, beside the paper's values of ``where``, in the order of the paper's tables."""
    if outcomes.empty:
        raise Missing("seeds that the methods have in common")
    rows = ["cell", "asked", "method"]
    summary = compare.summarize(outcomes, rows, [column.key for column in columns])
    summary = compare.beside_paper(summary, where)
    if where:  # a point of a sweep is not the paper's experiment
        summary.loc[summary["cell"] != "", ["paper", "difference"]] = float("nan")
    summary = labelled(summary, rows)
    kept = [*rows, "row", "column", "mean", "sd", "n", "paper", "difference"]
    used = [column for column in columns if (summary["column"] == column.key).any()]
    return Table(stem, title, used, summary[kept].reset_index(drop=True), notes=list(notes))


def only_like(table: Table, results: Results) -> Table:
    """Take out differences to the paper where a run is of another scale: they would say what the scale does.

    The paper's own values stay, and the note says what is not the same. A figure without ``setting`` is of all runs.
    """
    scales = {run["setting"]: run["other_scale"] for _, run in results.runs.iterrows()}
    figures = table.figures
    if "setting" in figures:
        other = figures["setting"].map(scales).fillna("") != ""
    else:
        other = pd.Series(any(scales.values()), index=figures.index)
    apart = other & figures["difference"].notna()
    if not apart.any():
        return table
    smaller = dict.fromkeys(scale for scale in scales.values() if scale)
    note = f"the paper's sizes are others than {' or '.join(smaller)}: its values are given, and no difference is told"
    return replace(
        table,
        figures=figures.assign(difference=figures["difference"].where(~apart)),
        notes=[*table.notes, note],
    )


def labelled(summary: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """Sort by the given columns, methods as the paper's tables do and all else as it came; add ``row``, its label.

    Of the columns before the method, the label has those in which rows differ.
    """
    ranks = {}
    for name in rows:
        values = list(dict.fromkeys(summary[name]))
        order = style.method_order(values) if name == "method" else values
        ranks[name] = summary[name].map({value: i for i, value in enumerate(order)})
    places = pd.DataFrame(ranks).sort_values(list(rows), kind="stable")
    summary = summary.loc[places.index]
    telling = [name for name in rows if name == "method" or summary[name].nunique() > 1]
    words = [name for name in telling if name != "setting"]
    if len(summary[words].drop_duplicates()) == len(summary[telling].drop_duplicates()):
        telling = words  # a hash is only worth reading where nothing else tells rows apart
    labels = []
    for found in zip(*(summary[name] for name in telling), strict=True) if telling else [()] * len(summary):
        named = [style.method(v) if name == "method" else str(v) for name, v in zip(telling, found, strict=True)]
        labels.append(" · ".join(part for part in named if part))
    return summary.assign(row=labels)


def settings(results: Results, job: str) -> Iterator[tuple[str, str, Results]]:
    """Yield each setting that a job was run in, newest first: stem, description, and its sound runs."""
    runs = results.runs[results.runs["job"] == job]
    sound = runs[runs["sound"].astype(bool)]
    if sound.empty:
        raise Missing(supply(runs, job))
    groups = sorted(sound.groupby("setting"), key=lambda item: str(max(item[1]["run_id"])), reverse=True)
    telling = [name for name in ("dataset", "profile", "split", "clients") if sound[name].nunique() > 1]
    for _, group in groups:
        first = group.iloc[0]
        words = [re.sub(r"[^A-Za-z0-9.]+", "", str(first[name]) or "full") for name in telling]
        yield "-".join([job, *words]), describe(first), results.only(group["run_id"])


def supply(runs: pd.DataFrame, job: str) -> str:
    """Say what would supply an item, given the runs of its job that cannot be used."""
    command = f"qdsim run {job}"
    states = dict(zip(runs["run_id"], runs["state"], strict=True))
    running = [run for run, state in states.items() if state == "running"]
    if running:
        return f"{running[0]} to end"
    halted = [run for run, state in states.items() if state in ("interrupted", "failed")]
    return f"{command} --resume" if halted else command


def describe(run: pd.Series) -> str:
    """Say in a few words what was run."""
    profile = f", profile {run['profile']}" if run["profile"] else ""
    apart = f", {run['apart']}" if run["apart"] else ""
    return f"{style.dataset(run['dataset'])}, {run['clients']} clients, {run['split']}{profile}{apart}"


def cell_settings(cell: str) -> list[tuple[str, str]]:
    """Split a cell's name into its keys and values."""
    parts = [part.partition("=") for part in re.split(r",(?=[A-Za-z_][\w.]*=)", cell) if part]
    return [(key, value) for key, _, value in parts]


def cell_words(cell: str) -> str:
    """Write a cell's name as a person would: ``synthetic.scale = 10 and unlearn.lr = 0.02``."""
    return joined([f"{key} = {value}" for key, value in cell_settings(cell)]) if cell else ""


def request_words(asked: str) -> str:
    """Write a request as a person would: ``2:class:8`` is the second of a sequence."""
    found = re.fullmatch(r"(?:(\d+):)?(class|client):([^ ]+)(.*)", asked)
    if not found:
        return asked
    position, kind, target, rest = found.groups()
    what = f"a random {kind}" if target == "random" else f"{kind} {target}"
    return f"{f'{position}. ' if position else ''}Forget {what}{rest}"


def joined(names: Sequence[str]) -> str:
    """Write names after one another: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def warnings(results: Results) -> list[str]:
    """Return what must be said under figures of these runs."""
    found = [caveat for caveat in dict.fromkeys(results.runs["caveat"]) if caveat]
    return [f"{caveat}; not compared with the paper" for caveat in found]


def first_of(frame: pd.DataFrame, *keys: str) -> tuple[pd.DataFrame, list[str]]:
    """Keep the first value of each key, for figures that can show one; say what is not shown."""
    notes = []
    for key in keys:
        values = list(dict.fromkeys(frame[key].astype(str)))
        if len(values) > 1:
            notes.append(f"shown: {values[0]}, the first of {len(values)}")
            frame = frame[frame[key].astype(str) == values[0]]
    return frame, notes


def tables(
    results: Results,
    job: str,
    title: str,
    columns: Sequence[Column],
    paper: Paper | None = None,
    notes: Sequence[str] = (),
) -> list[Table]:
    """Make a job's table for each setting."""
    made = []
    for stem, what, own in settings(results, job):
        outcomes, left_out = compare.paired(compare.outcomes(own))
        where = paper.where if paper and paper.covers(own.runs.iloc[0]) else None
        said = [*notes, *left_out, *warnings(own)]
        if any(column.key == SPEEDUP.key for column in columns):
            said.insert(0, f"speed-up in summed client compute: {compare.CONVERGED_RULE}")
        made.append(only_like(build(stem, f"{title} ({what})", outcomes, columns, where, said), own))
    return made
