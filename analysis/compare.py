"""What is compared with what: outcomes per seed, speed-ups against retraining, means beside the paper's values.

Two rows are compared only if they have the same seed and partition, the same setting, cell and request. Costs are
those of unlearning and recovery; start-up is in no clock of the tables, and training and fine-tuning are paid before.
"""

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
SAME = ["job", "setting", "cell", "partition", "asked", "request", "seed"]
"""Rows that agree in these may be compared."""
NO_RECOVERY = ("retrain", "s2u")
"""Methods that may end with what the tables call unlearning."""
CONVERGED_RULE = "retraining counted up to its first round within 1 point of its last R-Set accuracy"


def outcomes(results: Results) -> pd.DataFrame:
    """Return one row per seed, method and request: accuracies of each stage, costs and speed-ups.

    Columns are ``<stage>.<figure>``: stages ``before, unlearn, recover, relearn``, ``final`` (the last of unlearning
    and recovery) and ``total`` (the sum of both; null while a request is being served). ``speedup.<cost>`` is
    retraining's total over the method's as they ran, ``converged.<cost>`` the same with retraining counted up to its
    converged round only, ``relearn_speedup.*`` retraining's relearning over the method's. Null where the oracle of that
    seed and partition is not at hand; seconds are compared on the same hardware only.
    """
    if "outcomes" not in results.memo:
        results.memo["outcomes"] = _outcomes(results)
    found: pd.DataFrame = results.memo["outcomes"]
    return found.copy()


def _outcomes(results: Results) -> pd.DataFrame:
    stages = results.stages[results.stages["method"] != "shared"]
    texts = ("run_id", "dataset", *SAME, "method", "phase")
    # a few hundred rows at most: plain strings join and group without surprises
    stages = stages.astype({name: str for name in texts if name != "seed"})
    keys = ["dataset", "run_id", *SAME, "method"]
    if stages.empty:
        return pd.DataFrame(columns=keys)
    counted = ["rounds_run", "converged_round", "data_size"]
    figures = [*SCORES, *counted, "storage_bytes", "storage_bytes_nominal", *COSTS]
    wide = stages.pivot_table(index=keys, columns="phase", values=figures, aggfunc="last", sort=False)
    wide = wide.set_axis([f"{column[1]}.{column[0]}" for column in wide.columns], axis=1)
    first = stages[stages["phase"] == "unlearn"].set_index(keys)
    for score in SCORES:
        wide[f"before.{score}"] = first[f"{score}_start"]
        wide[f"final.{score}"] = _column(wide, f"recover.{score}").fillna(_column(wide, f"unlearn.{score}"))
    going_on = {run for run, manifest in results.manifests.items() if manifest.get("state") != "done"}
    table = wide.reset_index()
    over = (
        _column(table, "recover.rounds_run").notna()
        | table["method"].isin(NO_RECOVERY)
        | ~table["run_id"].isin(going_on)
    )
    for figure in (*COSTS, "rounds_run"):
        total = _column(table, f"unlearn.{figure}") + _column(table, f"recover.{figure}").fillna(0)
        table[f"total.{figure}"] = total.where(over)
    for figure in ("storage_bytes", "storage_bytes_nominal"):
        table[f"total.{figure}"] = _column(table, f"unlearn.{figure}")
    return _with_speedups(table, converged_costs(results, stages), results)


def _column(frame: pd.DataFrame, name: str) -> pd.Series:
    return frame[name] if name in frame else pd.Series(float("nan"), index=frame.index)


def converged_costs(results: Results, stages: pd.DataFrame) -> pd.DataFrame:
    """Return retraining's costs up to its converged round."""
    keys = ["run_id", *SAME]
    oracle = stages[(stages["method"] == ORACLE) & (stages["phase"] == "unlearn")]
    rounds = results.rounds
    rounds = rounds[(rounds["method"] == ORACLE) & (rounds["phase"] == "unlearn")]
    rounds = rounds.astype({name: str for name in keys if name != "seed"})
    rounds = rounds.merge(oracle[[*keys, "converged_round"]], on=keys)
    rounds = rounds[rounds["round"] <= rounds["converged_round"]]
    return rounds.groupby(keys)[list(COSTS)].sum().reset_index()


def _with_speedups(table: pd.DataFrame, converged: pd.DataFrame, results: Results) -> pd.DataFrame:
    oracle = table[table["method"] == ORACLE].merge(converged.add_prefix("until."), how="left",
        left_on=["run_id", *SAME], right_on=[f"until.{name}" for name in ("run_id", *SAME)])  # fmt: skip
    known = {"run_id": "oracle"}
    for cost in COSTS:
        known |= {f"total.{cost}": f"speedup.{cost}", f"until.{cost}": f"converged.{cost}"}
        known |= {f"relearn.{cost}": f"relearn_speedup.{cost}"} if f"relearn.{cost}" in table else {}
    merged = table.merge(oracle[[*SAME, *known]].rename(columns=known), on=SAME, how="left")
    hardware = {run: repr(manifest.get("hardware")) for run, manifest in results.manifests.items()}
    alike = merged["run_id"].map(hardware) == merged["oracle"].map(hardware)
    for cost in COSTS:
        own = merged[f"total.{cost}"]
        comparable = alike if cost.endswith("_s") else alike | True
        merged[f"speedup.{cost}"] = (merged[f"speedup.{cost}"] / own).where(comparable)
        times = (merged[f"converged.{cost}"] / own).where(comparable)
        # retraining against itself is once, wherever it is cut
        merged[f"converged.{cost}"] = times.where(merged["method"] != ORACLE, merged[f"speedup.{cost}"])
        if f"relearn.{cost}" in table:
            relearned = merged[f"relearn_speedup.{cost}"] / merged[f"relearn.{cost}"]
            merged[f"relearn_speedup.{cost}"] = relearned.where(comparable)
    return merged.drop(columns="oracle")


def paired(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Keep the seeds and partitions that all methods of a comparison have; say what was left out.

    A comparison is all rows of one job, setting, cell and request. A method that shares no seed with retraining, or
    else with the method that has most, is left out whole.
    """
    kept: list[pd.DataFrame] = []
    notes: list[str] = []
    for _, group in table.groupby(["job", "setting", "cell", "asked"], sort=False):
        having = {m: set(zip(own["seed"], own["partition"], strict=True)) for m, own in group.groupby("method")}
        order = sorted(having, key=lambda m: (m != ORACLE, -len(having[m]), m))
        common = having[order[0]]
        alone = []
        for method in order[1:]:
            if common & having[method]:
                common = common & having[method]
            else:
                alone.append(method)
        rows = group[~group["method"].isin(alone)]
        pairs = zip(rows["seed"], rows["partition"], strict=True)
        in_common = pd.Series([pair in common for pair in pairs], index=rows.index, dtype=bool)
        dropped = sorted({int(seed) for seed in rows.loc[~in_common, "seed"]})
        if dropped:
            notes.append(f"seeds {dropped} left out: not every method has them")
        if alone:
            notes.append(f"{', '.join(map(str, alone))} left out: no seed in common with {order[0]!s}")
        kept.append(rows[in_common])
    return (pd.concat(kept) if kept else table), list(dict.fromkeys(notes))


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
