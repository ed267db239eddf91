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
    Column("class.speedup", "class level", "Speed-up in client compute", "times"),
    Column("client.speedup", "client level", "Speed-up in client compute", "times"),
    Column("computation_efficiency", "efficiency in the paper", "", "text"),
)


def make(results: Results) -> list[Table]:
    """Join what all manifests declare with the means over all sound runs."""
    declared: dict[str, dict[str, Any]] = {}
    for manifest in results.manifests.values():
        declared |= manifest.get("methods") or {}
    if not declared:
        raise Missing(f"qdsim run jobs/{JOB}.toml")
    rows = [row for method in style.method_order(declared) for row in _declared(method, declared[method])]
    measured, notes = _measured(results)
    table = pd.concat([pd.DataFrame(rows), measured[measured["method"].isin(declared)]], ignore_index=True)
    places = {method: i for i, method in enumerate(style.method_order(declared))}
    table = table.sort_values("method", key=lambda m: m.map(places), kind="stable")
    table["row"] = [style.method(m) for m in table["method"]]
    used = [column for column in COLUMNS if (table["column"] == column.key).any()]
    reasons = [
        f"{style.method(m)}, no {what} level: {why}"
        if what != "relearn"
        else f"{style.method(m)} does not relearn: {why}"
        for m in style.method_order(declared)
        for what, why in (declared[m].get("reasons") or {}).items()
    ]
    notes += [f"speed-ups: {compare.CONVERGED_RULE}", *reasons]
    return [Table("table1_methods", TITLE, used, table.reset_index(drop=True), notes=notes)]


def _declared(method: str, supports: dict[str, Any]) -> Iterable[dict[str, Any]]:
    known = compare.paper()
    said = known[(known["where"] == "Table 1") & (known["row"] == method)].set_index("column")["value"]
    empty = {"sd": float("nan"), "n": float("nan"), "difference": float("nan")}
    for name in ABILITIES:
        theirs = {"yes": "✓", "no": "✗"}.get(said.get(name, ""), float("nan"))
        yield {
            "method": method,
            "column": name,
            "mean": "✓" if supports.get(name) else "✗",
            "paper": theirs,
            **empty,
        }
    if "computation_efficiency" in said:
        efficiency = said["computation_efficiency"]
        yield {"method": method, "column": "computation_efficiency", "mean": efficiency, "paper": float("nan"), **empty}


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
        group = group.rename(columns={"converged.client_compute_s": f"{level}.speedup"})
        run = results.runs[results.runs["setting"] == group["setting"].iloc[0]].iloc[0]
        notes.append(f"{level} level: measured by {group['job'].iloc[0]} ({by_method.describe(run)})")
        keys = [f"{level}.speedup", *(STORAGE if not found else ())]
        found.append(compare.summarize(group, ["method"], keys))
    if not found:
        return pd.DataFrame(columns=["method", "column", "mean", "sd", "n", "paper", "difference"]), notes
    return pd.concat(found).assign(paper=float("nan"), difference=float("nan")), notes
