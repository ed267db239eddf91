"""The result table of a run, from its Parquet tables alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qdsim.errors import BadInput
from qdsim.results import read_manifest

STAGE_NAMES = {
    "train": "trained",
    "unlearn": "unlearnt",
    "recover": "recovered",
    "relearn": "relearnt",
}
LOOSE_PROFILES = ("smoke",)


def read_table(run_dir: Path, table: str) -> pd.DataFrame:
    """Read one table of a run, finished or not."""
    folder = run_dir / "tables" / table
    if not folder.is_dir():
        raise BadInput("RUN", str(run_dir), f"no tables/{table} there")
    try:
        return pd.read_parquet(folder)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput("RUN", str(run_dir), f"tables/{table} cannot be read: {str(error).splitlines()[0]}") from None


def stage_table(run_dir: Path) -> pd.DataFrame:
    """Mean over seeds of each method's stages, in the order they ran, with the number of seeds n.

    Before unlearning, F-Set and R-Set are those of the trained model; the speed-up compares the summed
    client compute of a method's unlearning and recovery with that of retraining, seed by seed.
    """
    stages = read_table(run_dir, "stages")
    served = stages[stages["method"] != "shared"].copy()
    if served.empty:
        return pd.DataFrame()
    # in a sequence later requests start from what the ones before them left, not from the trained model
    first = ~served["request"].str.match(r"(?!1:)\d+:")
    before = served[(served["phase"] == "unlearn") & first]
    before = before.drop_duplicates(["seed", "request"]).assign(
        method="shared",
        phase="train",
        forget_accuracy=lambda t: t["forget_accuracy_start"],
        retain_accuracy=lambda t: t["retain_accuracy_start"],
    )
    train = stages[(stages["method"] == "shared") & (stages["phase"] == "train")].set_index("seed")
    for column in ("rounds_run", "samples", "client_compute_s"):
        before[column] = before["seed"].map(train[column])
    rows = pd.concat([before, served], ignore_index=True)
    order = {name: i for i, name in enumerate(method_titles(run_dir))}
    phases = {name: i for i, name in enumerate(STAGE_NAMES)}
    requests = {name: i for i, name in enumerate(sorted(set(served["request"]), key=_position))}
    grouped = rows.groupby(["request", "method", "phase"], sort=False)
    columns = ["forget_accuracy", "retain_accuracy", "rounds_run", "samples", "client_compute_s"]
    table = grouped[columns].mean().join(grouped.size().rename("n"))
    deviation = grouped[["forget_accuracy", "retain_accuracy"]].std().add_suffix("_sd")
    table = table.join(deviation).reset_index()
    table["speedup"] = [_speedup(served, row) for row in table.to_dict("records")]
    keys = [table["request"].map(requests), table["method"].map(order), table["phase"].map(phases)]
    return table.assign(a=keys[0], b=keys[1], c=keys[2]).sort_values(["a", "b", "c"]).drop(columns=["a", "b", "c"])


def _position(request: str) -> tuple[int, str]:
    """Sort a sequence by its positions, and independent requests by name."""
    position = request.split(":")[0]
    return (int(position), "") if position.isdigit() else (0, request)


def _speedup(served: pd.DataFrame, row: Mapping[Any, Any]) -> float | None:
    """Retraining's client compute over the method's, up to recovery; None where there is no comparison."""
    if row["method"] in ("shared", "retrain") or row["phase"] != "recover":
        return None
    costs = served[(served["request"] == row["request"]) & served["phase"].isin(["unlearn", "recover"])]
    total = costs.groupby(["method", "seed"])["client_compute_s"].sum()
    if "retrain" not in total.index or row["method"] not in total.index:
        return None
    ratio = (total["retrain"] / total[row["method"]]).dropna()
    return float(ratio.mean()) if len(ratio) else None


def notes(run_dir: Path) -> list[str]:
    """Return what must be said under the figures."""
    manifest = read_manifest(run_dir)
    found = []
    if manifest.get("state") != "done":
        found.append(f"the run is not finished: {manifest.get('state')}")
    profile = (manifest.get("origin") or {}).get("profile")
    if profile in LOOSE_PROFILES:
        found.append(f"profile {profile}: these numbers show that the job runs, and mean nothing else")
    note = (manifest.get("data") or {}).get("note")
    return [*found, note] if note else found


def method_titles(run_dir: Path) -> dict[str, str]:
    """Return the methods' names as the paper writes them, in the order of the job."""
    manifest = read_manifest(run_dir)
    methods = manifest.get("methods") or {}
    order = (manifest.get("config") or {}).get("methods") or list(methods)
    return {"shared": "before", **{name: methods.get(name, {}).get("title", name) for name in order}}
