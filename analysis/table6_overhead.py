"""Table 6: what distillation adds to the compute of training, per data set."""

from analysis import by_method, compare, style
from analysis.load import Results
from analysis.outputs import Column, Missing, Table

JOB = "table6_overhead"
TITLE = "Table 6: compute overhead of distillation"
COLUMNS = (
    Column("compute_s", "Total compute time", "", "seconds"),
    Column("matching_s", "Distillation time", "", "seconds"),
    Column("overhead", "Overhead", "", "percent"),
    Column("plain_s", "Training without it", "", "seconds"),
)
NOTES = (
    "compute: summed over clients and rounds of training; overhead: distillation's share of it, as in the paper",
    "training without it is measured on its own, with synthetic.matching = false",
)


def make(results: Results) -> list[Table]:
    """Make one table with a row for each data set that the job was run on; without it, any distilling training does."""
    clients = results.clients
    train = clients[clients["run_id"].isin(results.sound) & (clients["phase"] == "train")]
    if (train["job"] == JOB).any():
        train = train[train["job"] == JOB]
    sums = train.groupby(["dataset", "setting", "cell", "partition", "seed", "run_id"], observed=True, as_index=False)[
        ["compute_s", "matching_s"]
    ].sum()
    distilled = sums[sums["matching_s"] > 0].copy()
    if distilled.empty:
        raise Missing(f"qdsim run jobs/{JOB}.toml")
    same = ["setting", "partition", "seed", "run_id"]
    plain = sums[sums["matching_s"] == 0].groupby(same, observed=True)["compute_s"].mean().rename("plain_s")
    distilled = distilled.join(plain, on=same)
    distilled["overhead"] = distilled["matching_s"] / distilled["compute_s"]
    # a training that several runs reused is one measurement, not many
    distilled = distilled.drop_duplicates(["setting", "partition", "seed", "compute_s"])
    described = {run["run_id"]: by_method.describe(run) for _, run in results.runs.iterrows()}
    distilled["what"] = distilled["run_id"].astype(str).map(described)
    distilled["dataset"] = distilled["dataset"].astype(str)
    summary = compare.summarize(distilled, ["dataset", "what"], [column.key for column in COLUMNS])
    summary = compare.beside_paper(summary, "Table 6", row="dataset")
    order = {name: i for i, name in enumerate(style.DATASETS)}
    summary = summary.sort_values("dataset", key=lambda d: d.map(order), kind="stable")
    summary["row"] = summary["what"]
    warnings = by_method.warnings(results, results.runs[results.runs["run_id"].isin(distilled["run_id"])])
    used = [column for column in COLUMNS if (summary["column"] == column.key).any()]
    table = Table(JOB, TITLE, used, summary.reset_index(drop=True), "training", [*NOTES, *warnings])
    return [table]
