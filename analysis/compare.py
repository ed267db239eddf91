"""What is compared with what: outcomes per seed, speed-ups against retraining, means beside the paper's values.

Two rows are compared only if they have the same seed and partition, the same setting, cell and request. Costs are
those of unlearning and recovery; start-up is in no clock of the tables, and training and fine-tuning are paid before.
"""

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import pandas as pd

from analysis.load import Results

ORACLE = "retrain"
COSTS = {
    "client_compute_s": "client compute",
    "critical_path_s": "critical path",
    "samples": "samples",
}
"""Three ways to count a cost; the paper's seconds are the first, its clients having run one after the other."""
SCORES = ("forget_accuracy", "retain_accuracy")
SAME = ["setting", "cell", "partition", "asked", "seed"]
"""Rows that agree in these may be compared."""
CONVERGED_RULE = "retraining counted up to its first round within 1 point of its last R-Set accuracy"


def served(results: Results, job: str | None = None, runs: Iterable[str] | None = None) -> pd.DataFrame:
    """Return the stages of methods in sound runs; of several runs of one method and seed, the newest's.

    ``runs`` names runs to look at instead, sound or not.
    """
    stages = results.stages
    chosen = results.sound if runs is None else set(runs)
    stages = stages[stages["run_id"].isin(chosen) & (stages["method"] != "shared")]
    if job is not None:
        stages = stages[stages["job"] == job]
    if stages.empty:
        return stages
    # a few hundred rows at most: plain strings join and group without surprises
    stages = stages.astype(
        {name: str for name in ("run_id", "job", "dataset", *SAME, "method", "phase") if name != "seed"}
    )
    same = [*SAME, "job", "method"]
    newest = stages.groupby(same, observed=True)["run_id"].transform(lambda ids: max(map(str, ids)))
    return stages[stages["run_id"].astype(str) == newest.astype(str)]


def outcomes(results: Results, job: str | None = None, runs: Iterable[str] | None = None) -> pd.DataFrame:
    """Return one row per seed, method and request: accuracies of each stage, costs and speed-ups.

    Columns are ``<stage>.<figure>``: stages ``before, unlearn, recover, relearn``, ``final`` (the last of unlearning
    and recovery) and ``total`` (the sum of both). ``speedup.<cost>`` is retraining's total over the method's as they
    ran, ``converged.<cost>`` the same with retraining counted up to its converged round only, ``relearn_speedup.*``
    retraining's relearning over the method's. Null where the oracle of that seed and partition is not at hand.
    """
    stages = served(results, job, runs)
    keys = ["job", "dataset", *SAME, "method"]
    if stages.empty:
        return pd.DataFrame(columns=keys)
    figures = [*SCORES, "rounds_run", "data_size", "storage_bytes", "storage_bytes_nominal", *COSTS]
    wide = stages.pivot_table(index=keys, columns="phase", values=figures, observed=True, aggfunc="last")
    wide = wide.set_axis([f"{column[1]}.{column[0]}" for column in wide.columns], axis=1)
    first = stages[stages["phase"] == "unlearn"].set_index(keys)
    for score in SCORES:
        wide[f"before.{score}"] = first[f"{score}_start"]
        wide[f"final.{score}"] = _either(wide, f"recover.{score}", f"unlearn.{score}")
    for cost in COSTS:
        wide[f"total.{cost}"] = _column(wide, f"unlearn.{cost}") + _column(wide, f"recover.{cost}").fillna(0)
    wide["total.rounds_run"] = _column(wide, "unlearn.rounds_run") + _column(wide, "recover.rounds_run").fillna(0)
    wide["total.storage_bytes"] = _column(wide, "unlearn.storage_bytes")
    wide["total.storage_bytes_nominal"] = _column(wide, "unlearn.storage_bytes_nominal")
    table = wide.reset_index()
    return _with_speedups(table, _converged_costs(results, stages))


def _column(frame: pd.DataFrame, name: str) -> pd.Series:
    return frame[name] if name in frame else pd.Series(float("nan"), index=frame.index)


def _either(frame: pd.DataFrame, first: str, second: str) -> pd.Series:
    return _column(frame, first).fillna(_column(frame, second))


def _converged_costs(results: Results, stages: pd.DataFrame) -> pd.DataFrame:
    """Return retraining's costs up to its converged round, by run and ``SAME``."""
    oracle = stages[(stages["method"] == ORACLE) & (stages["phase"] == "unlearn")]
    rounds = results.rounds
    rounds = rounds[(rounds["method"] == ORACLE) & (rounds["phase"] == "unlearn")]
    rounds = rounds.astype({name: str for name in ("run_id", *SAME) if name != "seed"})
    rounds = rounds.merge(oracle[["run_id", *SAME, "converged_round"]], on=["run_id", *SAME])
    rounds = rounds[rounds["round"] <= rounds["converged_round"]]
    return rounds.groupby(SAME, observed=True)[list(COSTS)].sum().reset_index()


def _with_speedups(table: pd.DataFrame, converged: pd.DataFrame) -> pd.DataFrame:
    oracle = table[table["method"] == ORACLE].drop_duplicates(SAME)
    totals = {f"total.{cost}": f"speedup.{cost}" for cost in COSTS}
    relearnt = {f"relearn.{cost}": f"relearn_speedup.{cost}" for cost in COSTS if f"relearn.{cost}" in table}
    merged = table.merge(oracle[[*SAME, *totals, *relearnt]].rename(columns=totals | relearnt), on=SAME, how="left")
    converged = converged.rename(columns={cost: f"converged.{cost}" for cost in COSTS})
    merged = merged.merge(converged, on=SAME, how="left")
    for cost in COSTS:
        own = merged[f"total.{cost}"]
        merged[f"speedup.{cost}"] = merged[f"speedup.{cost}"] / own
        merged[f"converged.{cost}"] = merged[f"converged.{cost}"] / own
        if f"relearn.{cost}" in relearnt:
            merged[f"relearn_speedup.{cost}"] = merged[f"relearn_speedup.{cost}"] / merged[f"relearn.{cost}"]
    return merged


def paired(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Keep the seeds and partitions that every method of a comparison has; say which seeds were left out.

    A comparison is all rows of one setting, cell and request.
    """
    kept, notes = [], []
    for _, group in table.groupby(["setting", "cell", "asked"], observed=True, sort=False):
        methods = group["method"].nunique()
        having = group.groupby(["seed", "partition"], observed=True)["method"].transform("nunique")
        dropped = sorted(set(group.loc[having < methods, "seed"]))
        if dropped:
            notes.append(f"seeds {dropped} left out: not every method has them")
        kept.append(group[having == methods])
    return (pd.concat(kept) if kept else table), notes


def summarize(table: pd.DataFrame, by: list[str], columns: list[str]) -> pd.DataFrame:
    """Return mean, standard deviation (n - 1; null for one seed) and n of each column, long: a row per figure."""
    long = table.melt(id_vars=by, value_vars=[c for c in columns if c in table], var_name="column")
    long = long.dropna(subset="value")
    long["value"] = long["value"].astype(float)
    grouped = long.groupby([*by, "column"], observed=True, sort=False)["value"]
    return grouped.agg(mean="mean", sd="std", n="count").reset_index()


@cache
def paper() -> pd.DataFrame:
    """Return the paper's values: ``where, row, column, value, unit, source``; percentages as fractions."""
    with (files("analysis") / "paper.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file, dtype=str)
    number = pd.to_numeric(table["value"], errors="coerce")
    table["number"] = number.where(table["unit"] != "percent", number / 100)
    return table


def paper_value(where: str, row: str, column: str) -> float | None:
    """Return one number of the paper, or None where it gives none."""
    table = paper()
    found = table[(table["where"] == where) & (table["row"] == row) & (table["column"] == column)]
    return float(found["number"].iloc[0]) if len(found) and pd.notna(found["number"].iloc[0]) else None


def beside_paper(summary: pd.DataFrame, where: str | None, row: str = "method") -> pd.DataFrame:
    """Add the paper's value and the difference, ours less the paper's, to a summary."""
    values = [
        paper_value(where, str(name), column) if where else None
        for name, column in zip(summary[row], summary["column"], strict=True)
    ]
    table = summary.assign(paper=pd.array(values, dtype="Float64").to_numpy(dtype=float, na_value=float("nan")))
    return table.assign(difference=table["mean"] - table["paper"])
