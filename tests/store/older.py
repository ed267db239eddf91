"""Runs as older versions wrote them: the same values in the words of that time, in files that do not say whose."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qdsim.store import arrays

COLUMNS_OF_3 = {"stop_reason": "rule", "max_rounds": "rounds_most"}
ATTACKS_OF_3 = {"loss_threshold": "balanced", "entropy_svm": "literal"}


def part_of_3(path: Path, table: str) -> None:
    """Write a part anew in the words of version 3; one of ``membership`` has the attack in its name."""
    data = pq.read_table(path)
    metadata = {**data.schema.metadata, b"qdsim.schema_version": b"3"}
    if table == "stages":
        data = data.rename_columns([COLUMNS_OF_3.get(name, name) for name in data.column_names])
    if table == "membership":
        values = pa.array([ATTACKS_OF_3[name] for name in data["attack"].to_pylist()], pa.string())
        data = data.set_column(data.column_names.index("attack"), "attack", values)
    path.unlink()
    for now, then in ATTACKS_OF_3.items():
        path = path.with_name(path.name.replace(f"-{now}.", f"-{then}."))
    pq.write_table(data.replace_schema_metadata(metadata), path, compression="zstd", write_page_checksum=True)


def make_format_1(out: Path) -> None:
    """Turn what lies under a folder, runs and trained states, into what was written before files said whose."""
    for path in out.rglob("*.npz"):
        kept = {name: array for name, array in np.load(path).items() if name != arrays.IDENTITY}
        kept[arrays.NAMES] = np.array(sorted(name for name in kept if name != arrays.NAMES))
        np.savez(path, **kept)
    for path in out.rglob("*.json"):
        if path.name in ("manifest.json", "state.json"):
            content = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in content.items() if k not in ("format", "sha256")}))
    for path in out.glob(".trained/*/tables/*.parquet"):
        data = pq.read_table(path)
        metadata = {**data.schema.metadata, b"qdsim.run_id": b""}
        pq.write_table(data.replace_schema_metadata(metadata), path, compression="zstd", write_page_checksum=True)


def make_version_3(run_dir: Path) -> None:
    """Turn a run into one of version 3: every part, and the attacks in the manifest's configuration."""
    make_format_1(run_dir)
    for part in list((run_dir / "tables").rglob("*.parquet")):
        part_of_3(part, part.parent.name)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    config = manifest["config"]
    config["membership"] = [ATTACKS_OF_3[name] for name in config["membership"]]
    manifest["config_sha256"] = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    (run_dir / "manifest.json").write_text(json.dumps(manifest))


def copied_as_version_3(run_dir: Path, folder: Path) -> Path:
    """Return a copy of a run, under its own name, as version 3 wrote it."""
    copy = folder / run_dir.name
    shutil.copytree(run_dir, copy)
    make_version_3(copy)
    return copy
