"""The result table of a run, from its Parquet tables alone."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from qdsim.errors import BadInput
from qdsim.store.run_directory import read_manifest, read_table
from qdsim.store.storage import StoragePath

STAGE_NAMES = {
    "train": "trained",
    "unlearn": "unlearned",
    "recover": "recovered",
    "relearn": "relearned",
}
LOOSE_PROFILES = ("smoke",)


def stage_table(run_dir: StoragePath) -> pd.DataFrame:
    """Mean over seeds of each method's stages, in the order they ran, with the number of seeds n.

    Before unlearning, F-Set and R-Set are those of the trained model; the speed-up compares the summed
    client compute of a method's unlearning and recovery with that of retraining, seed by seed.
    """
    stages = _read_named(run_dir, "stages")
    served = stages[stages["method"] != "shared"].copy()
    if served.empty:
        return pd.DataFrame()
    rows = pd.concat([_before(stages, served), served], ignore_index=True)
    grouped = rows.groupby(["cell", "request", "method", "phase"], sort=False)
    columns = ["forget_accuracy", "retain_accuracy", "rounds_run", "samples", "client_compute_s"]
    table = grouped[columns].mean().join(grouped.size().rename("n"))
    deviation = grouped[["forget_accuracy", "retain_accuracy"]].std().add_suffix("_sd")
    table = table.join(deviation).reset_index()
    table["speedup"] = [_speedup(served, row) for row in table.to_dict("records")]
    return _in_order(table, run_dir, ["cell", "request", "method", "phase"])


def membership_table(run_dir: StoragePath) -> pd.DataFrame:
    """Mean over seeds of each attack's figures, F-Set and R-Set in one row.

    ``forget_gap`` is the mean distance to the rate of the same seed's retrained model, where there is one yet.
    """
    found = _read_named(run_dir, "membership")
    if found.empty:
        return found
    keys = ["cell", "request", "attack", "method"]
    figures = ["member_rate", "auc", "tpr_at_1pct_fpr"]
    halves = [
        found[found["subset"] == subset].set_index([*keys, "seed"])[figures].add_suffix(f"_{subset}")
        for subset in ("forget", "retain")
    ]
    table = halves[0].join(halves[1]).reset_index()
    same_seed = ["cell", "request", "attack", "seed"]
    oracle = table[table["method"] == "retrain"].set_index(same_seed)["member_rate_forget"]
    table = table.join(oracle.rename("oracle"), on=same_seed)
    table["forget_gap"] = table["member_rate_forget"] - table["oracle"]
    means = table.drop(columns="seed").groupby(keys).mean().reset_index()
    return _in_order(means, run_dir, keys)


def _read_named(run_dir: StoragePath, table: str) -> pd.DataFrame:
    """Read a table with random targets under one name, ``client:random``: each seed has drawn its own."""
    whole = read_table(run_dir, table)
    if whole is None:
        raise BadInput("RUN", str(run_dir), f"no tables/{table} there")
    found: pd.DataFrame = whole.to_pandas()
    names = asked_names(read_manifest(run_dir))
    if names:
        rows = zip(found["cell"], found["seed"], found["request"], strict=True)
        found["request"] = [names.get(row, row[2]) for row in rows]
    return found


def asked_names(manifest: Mapping[str, Any]) -> dict[tuple[str, int, str], str]:
    """Map cell, seed and request to the request as the job has it, where the target was drawn: ``client:random``."""
    names: dict[tuple[str, int, str], str] = {}
    config = manifest.get("config") or {}
    for cell in manifest.get("cells") or []:
        for seed, labels in (cell.get("requests") or {}).items():
            for i, (label, asked) in enumerate(zip(labels, config.get("requests") or [], strict=False)):
                if asked.get("target") == "random":
                    name = f"{asked.get('kind')}:random"
                    if config.get("sequence"):
                        name = f"{i + 1}:{name}"
                    elif len(labels) > 1:
                        name = f"{name} ({i + 1})"
                    names[str(cell.get("cell", "")), int(seed), label] = name
    return names


def _before(stages: pd.DataFrame, served: pd.DataFrame) -> pd.DataFrame:
    """Return rows for the trained model, as it was before each request."""
    # in a sequence later requests start from what the ones before them left, not from the trained model
    first = ~served["request"].str.match(r"(?!1:)\d+:")
    before = served[(served["phase"] == "unlearn") & first]
    before = before.drop_duplicates(["cell", "seed", "request"]).assign(
        method="shared",
        phase="train",
        forget_accuracy=lambda t: t["forget_accuracy_start"],
        retain_accuracy=lambda t: t["retain_accuracy_start"],
    )
    train = stages[(stages["method"] == "shared") & (stages["phase"] == "train")].set_index(["cell", "seed"])
    trained = pd.MultiIndex.from_frame(before[["cell", "seed"]])
    for column in ("rounds_run", "samples", "client_compute_s"):
        before[column] = train[column].reindex(trained).to_numpy()
    return before


def _in_order(table: pd.DataFrame, run_dir: StoragePath, keys: list[str]) -> pd.DataFrame:
    """Sort by cell, request, method and phase as the job lists them."""
    manifest = read_manifest(run_dir)
    ranks: dict[str, list[str]] = {
        "cell": [cell["cell"] for cell in manifest.get("cells") or []],
        "request": sorted(set(table["request"]), key=_position),
        "method": list(method_titles(run_dir)),
        "phase": list(STAGE_NAMES),
        "attack": sorted(set(table.get("attack", []))),
    }
    places = pd.DataFrame({key: table[key].map({name: i for i, name in enumerate(ranks[key])}) for key in keys})
    return table.loc[places.sort_values(keys).index].reset_index(drop=True)


def _position(request: str) -> tuple[int, str]:
    """Sort a sequence by its positions, and independent requests by name."""
    position = request.split(":")[0]
    return (int(position), "") if position.isdigit() else (0, request)


def _speedup(served: pd.DataFrame, row: Mapping[Any, Any]) -> float | None:
    """Retraining's client compute over the method's, up to recovery; None where there is no comparison."""
    if row["method"] in ("shared", "retrain") or row["phase"] not in ("unlearn", "recover"):
        return None
    own = served[(served["cell"] == row["cell"]) & (served["request"] == row["request"])]
    own = own[own["method"] == row["method"]]
    if row["phase"] == "unlearn" and (own["phase"] == "recover").any():  # said once, where the method has ended
        return None
    same = (served["cell"] == row["cell"]) & (served["request"] == row["request"])
    costs = served[same & served["phase"].isin(["unlearn", "recover"])]
    total = costs.groupby(["method", "seed"])["client_compute_s"].sum()
    if "retrain" not in total.index or row["method"] not in total.index:
        return None
    ratio = (total["retrain"] / total[row["method"]]).dropna()
    return float(ratio.mean()) if len(ratio) else None


def notes(run_dir: StoragePath) -> list[str]:
    """Return what must be said under the figures."""
    manifest = read_manifest(run_dir)
    found = []
    relearns = ((manifest.get("config") or {}).get("relearn") or {}).get("rounds")
    for method in (manifest.get("methods") or {}).values():
        if relearns and not method.get("relearn") and not (manifest.get("config") or {}).get("sequence"):
            found.append(f"{method['title']} does not relearn: {method['reasons']['relearn']}")
    if manifest.get("state") != "done":
        found.append(f"the run is not finished: {manifest.get('state')}")
    profile = (manifest.get("origin") or {}).get("profile")
    if profile in LOOSE_PROFILES:
        found.append(f"profile {profile}: these numbers show that the job runs, and mean nothing else")
    note = (manifest.get("data") or {}).get("note")
    return [*found, note] if note else found


def method_titles(run_dir: StoragePath) -> dict[str, str]:
    """Return the methods' names as the paper writes them, in the order of the job."""
    manifest = read_manifest(run_dir)
    methods = manifest.get("methods") or {}
    order = manifest.get("method_names") or (manifest.get("config") or {}).get("methods") or list(methods)
    return {"shared": "before", **{name: methods.get(name, {}).get("title", name) for name in order}}
