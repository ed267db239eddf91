"""After how many requests the cost of distillation is paid back."""

import numpy as np

from analysis import compare, style
from analysis.load import Results
from analysis.outputs import Column, Table

COLUMNS = (
    Column("matching_s", "Distillation", "Client compute", "seconds"),
    Column("own_s", "QuickDrop, a request", "Client compute", "seconds"),
    Column("other_s", "instead of it", "Client compute", "seconds"),
    Column("requests", "Requests until it is paid back", "", "count"),
)
NOTE = "never: a request costs QuickDrop no less than that method, so the table leaves the number out"


def make(results: Results, stem: str, title: str, runs: list[str], notes: list[str]) -> list[Table]:
    """Make the table where QuickDrop and another method served the same request."""
    outcomes = compare.outcomes(results, runs=runs)
    clients = results.clients[results.clients["run_id"].isin(runs) & (results.clients["phase"] == "train")]
    keys = ["setting", "cell", "partition", "seed"]
    clients = clients.astype({name: str for name in (*keys, "run_id") if name != "seed"})
    paid = clients.groupby([*keys, "run_id"])["matching_s"].sum().groupby(keys).max()
    if outcomes.empty or not (paid > 0).any():
        return []
    cost = "total.client_compute_s"
    own = outcomes[outcomes["method"] == "quickdrop"].set_index(compare.SAME)[cost].rename("own_s")
    table = outcomes[outcomes["method"] != "quickdrop"].merge(own.reset_index(), on=compare.SAME)
    table = table.merge(paid.reset_index(), on=keys)
    table = table[table["matching_s"] > 0].rename(columns={cost: "other_s"})
    if table.empty:
        return []
    saved = table["other_s"] - table["own_s"]
    table["requests"] = np.ceil(table["matching_s"] / saved).where(saved > 0)
    summary = compare.beside_paper(
        compare.summarize(table.astype({"method": str}), ["method"], [c.key for c in COLUMNS]), None
    )
    ranks = {method: i for i, method in enumerate(style.method_order(summary["method"]))}
    summary = summary.sort_values("method", key=lambda m: m.map(ranks), kind="stable")
    summary["row"] = [style.method(m) for m in summary["method"]]
    return [Table(stem, title, COLUMNS, summary.reset_index(drop=True), "instead of", [NOTE, *notes])]
