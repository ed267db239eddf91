"""After how many requests the cost of distillation is paid back."""

import numpy as np

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Table

COLUMNS = (
    Column("matching_s", "Distillation", "Client compute", "seconds"),
    Column("own_s", "QuickDrop, a request", "Client compute", "seconds"),
    Column("other_s", "instead of it", "Client compute", "seconds"),
    Column("requests", "Requests until it is paid back", "", "count"),
)


def make(results: Results, stem: str, title: str, notes: list[str]) -> list[Table]:
    """Make the table where QuickDrop and another method served the same request."""
    outcomes = compare.outcomes(results)
    keys = ["job", "setting", "cell", "partition", "seed"]
    before = results.clients[results.clients["phase"].isin(["train", "finetune"])]
    before = before.astype({name: str for name in keys if name != "seed"})
    # fine-tuning refines synthetic sets and does nothing else
    cost = before["matching_s"].where(before["phase"] == "train", before["compute_s"])
    paid = before.assign(matching_s=cost).groupby(keys)["matching_s"].sum().reset_index()
    total = "total.client_compute_s"
    if outcomes.empty or total not in outcomes:
        return []
    own = outcomes[outcomes["method"] == "quickdrop"][[*compare.SAME, total]].rename(columns={total: "own_s"})
    table = outcomes[outcomes["method"] != "quickdrop"].merge(own, on=compare.SAME).merge(paid, on=keys)
    table = table[table["matching_s"] > 0].rename(columns={total: "other_s"})
    if table.empty:
        return []
    saved = table["other_s"] - table["own_s"]
    table["requests"] = np.ceil(table["matching_s"] / saved).where(saved > 0)
    never = table[saved <= 0].groupby("method").size()
    said = [f"never paid back against {style.method(m)} in {n} of the seeds and requests" for m, n in never.items()]
    rows = ["cell", "asked", "method"]
    summary = compare.beside_paper(compare.summarize(table, rows, [c.key for c in COLUMNS]), None)
    summary = by_method.labelled(summary, rows)
    return [Table(stem, title, COLUMNS, summary.reset_index(drop=True), "instead of", [*said, *notes])]
