"""Table 1: what each method can do, as it declares in the manifest, with what its storage and compute came to."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Missing, Table

JOB = "table2_cifar10"
"""Any run declares its methods; this one and a client-level one measure all of them."""
TITLE = "Table 1: what each method can do"
PREFERRED = (JOB, "table4_client_noniid")
STORAGE = ("total.storage_bytes", "total.storage_bytes_nominal")
ABILITIES = {"class": "Class", "client": "Client", "relearn": "Relearn"}
COLUMNS = (
    *(Column(name, label, "Declared", "text") for name, label in ABILITIES.items()),
    Column("total.storage_bytes", "stored", "Storage", "bytes"),
    Column("total.storage_bytes_nominal", "by its paper", "Storage", "bytes"),
    Column("storage_efficient", "efficient in the paper", "Storage", "text"),
    Column("class.speedup", "class level", "Speed-up in client compute", "times"),
    Column("client.speedup", "client level", "Speed-up in client compute", "times"),
    Column("computation_efficiency", "efficiency in the paper", "Speed-up in client compute", "text"),
)
MARKS = {"yes": "✓", "no": "✗"}


def make(results: Results) -> list[Table]:
    """Join what all manifests declare with the fullest comparison of sound runs."""
    declared: dict[str, dict[str, Any]] = {}
    for manifest in results.manifests.values():
        declared |= manifest.get("methods") or {}
    if not declared:
        raise Missing(f"qdsim run {JOB}")
    rows = [row for method in style.method_order(declared) for row in _declared(method, declared[method])]
    measured, notes = _measured(results.sound)
    table = pd.concat([pd.DataFrame(rows), measured[measured["method"].isin(declared)]], ignore_index=True)
    table = by_method.labelled(table, ["method"])
    used = [column for column in COLUMNS if (table["column"] == column.key).any()]
    notes.append(f"speed-ups: {compare.CONVERGED_RULE}")
    for method in style.method_order(declared):
        for what, why in (declared[method].get("reasons") or {}).items():
            able = "does not relearn" if what == "relearn" else f"serves no {what} request"
            notes.append(f"{style.method(method)} {able}: {why}")
    return [Table("table1_methods", TITLE, used, table.reset_index(drop=True), notes=notes)]


def _declared(method: str, supports: dict[str, Any]) -> Iterable[dict[str, Any]]:
    known = compare.paper()
    said = known[(known["where"] == "Table 1") & (known["row"] == method)].set_index("column")["value"]
    empty = {"sd": float("nan"), "n": float("nan"), "paper": float("nan"), "difference": float("nan")}
    for name in ABILITIES:
        theirs = MARKS.get(str(said.get(name)), float("nan"))
        yield {"method": method, "column": name, **empty, "mean": "✓" if supports.get(name) else "✗", "paper": theirs}
    for name in ("storage_efficient", "computation_efficiency"):
        if name in said:
            theirs = MARKS.get(said[name], said[name])
            yield {"method": method, "column": name, **empty, "mean": "", "paper": theirs}


def _measured(results: Results) -> tuple[pd.DataFrame, list[str]]:
    """Return storage and speed-ups of the fullest comparison at each level, and say which that is."""
    outcomes = compare.outcomes(results)
    found: list[pd.DataFrame] = []
    notes: list[str] = []
    kind = outcomes["asked"].str.extract(r"^(class|client):")[0] if len(outcomes) else pd.Series(dtype=str)
    for level in ("class", "client"):
        own = outcomes[kind == level]
        if own.empty:
            continue
        groups = [group for _, group in own.groupby(["job", "setting", "cell", "asked"])]
        group = max(groups, key=lambda g: (g["method"].nunique(), g["job"].iloc[0] in PREFERRED))
        group, _ = compare.paired(group)
        group = group.rename(columns={"converged.client_compute_s": f"{level}.speedup"})
        run = results.runs[results.runs["setting"] == group["setting"].iloc[0]].iloc[0]
        notes.append(f"{level} level: measured by {group['job'].iloc[0]} ({by_method.describe(run)})")
        found.append(compare.summarize(group, ["method"], [f"{level}.speedup", *STORAGE]))
    if not found:
        return pd.DataFrame(columns=["method", "column", "mean", "sd", "n", "paper", "difference"]), notes
    table = pd.concat(found).drop_duplicates(["method", "column"])  # storage: at class level where it is known
    return table.assign(paper=float("nan"), difference=float("nan")), notes
