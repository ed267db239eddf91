"""Table 6: what distillation adds to the compute of training, per data set."""

from analysis import by_method, compare
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
    sound = results.sound
    clients = sound.clients[sound.clients["phase"] == "train"]
    if (clients["job"] == JOB).any():
        clients = clients[clients["job"] == JOB]
    keys = ["dataset", "setting", "cell", "partition", "seed", "run_id"]
    clients = clients.astype({name: str for name in keys if name != "seed"})
    sums = clients.groupby(keys, sort=False)[["compute_s", "matching_s"]].sum().reset_index()
    distilled = sums[sums["matching_s"] > 0].copy()
    if distilled.empty:
        raise Missing(by_method.supply(results.runs[results.runs["job"] == JOB], JOB))
    # a training that several runs reused is one measurement, not many
    distilled = distilled.drop_duplicates(["dataset", "partition", "seed", "compute_s", "matching_s"])
    same = ["setting", "partition", "seed"]
    plain = sums[sums["matching_s"] == 0].drop_duplicates(same, keep="last")[[*same, "compute_s"]]
    distilled = distilled.merge(plain.rename(columns={"compute_s": "plain_s"}), on=same, how="left")
    distilled["overhead"] = distilled["matching_s"] / distilled["compute_s"]
    described = {run["run_id"]: by_method.describe(run) for _, run in sound.runs.iterrows()}
    distilled["what"] = distilled["run_id"].map(described)
    rows = ["dataset", "what", "setting", "cell"]
    summary = compare.summarize(distilled, rows, [column.key for column in COLUMNS])
    row = summary["dataset"].replace({"svhn+extra": "svhn"})
    summary = compare.beside_paper(summary.assign(paper_row=row), "Table 6", row="paper_row")
    apart = set(sound.runs.loc[sound.runs["caveat"] != "", "setting"])
    summary.loc[summary["setting"].isin(apart), ["paper", "difference"]] = float("nan")
    summary = by_method.labelled(summary, rows).drop(columns="paper_row")
    summary["row"] = [" · ".join(filter(None, names)) for names in zip(summary["what"], summary["cell"], strict=True)]
    used = [column for column in COLUMNS if (summary["column"] == column.key).any()]
    warnings = by_method.warnings(sound.only(distilled["run_id"]))
    table = Table(JOB, TITLE, used, summary.reset_index(drop=True), "training", [*NOTES, *warnings])
    return [by_method.only_like(table, sound.only(distilled["run_id"]))]
