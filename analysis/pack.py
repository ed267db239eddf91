"""A run as a few small files, to be shared or kept: one Parquet file a table, and the manifest without its machine."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qdsim.errors import BadInput
from qdsim.results import read_manifest
from qdsim.tables import COLUMNS

PRIVATE = {"hardware": ("host", "system"), "data": ("root",)}
"""What says where a run was made rather than what it was."""


def pack(run_dir: Path, out: Path) -> Path:
    """Write a finished run into ``out`` under its own name; ``analysis.load`` reads it as it reads any run."""
    manifest = read_manifest(run_dir)
    if manifest.get("state") != "done":
        raise BadInput("RUN", str(run_dir), f"it is {manifest.get('state')}; only a finished run is packed")
    packed = out / run_dir.name
    if packed.exists():
        raise BadInput("--out", str(packed), "is there already; parts are never mixed")
    for table in COLUMNS:
        folder = run_dir / "tables" / table
        files = sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))
        if not files:
            continue
        (packed / "tables" / table).mkdir(parents=True)
        data = pa.concat_tables([pq.ParquetFile(path).read() for path in files])
        pq.write_table(data, packed / "tables" / table / "all.parquet", compression="zstd")
    text = json.dumps(_without_machine(manifest), indent=2, sort_keys=True)
    (packed / "manifest.json").write_text(f"{text}\n", encoding="utf-8")
    return packed


def _without_machine(manifest: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in manifest.items() if k != "earlier"}
    kept["hardware"] = {k: v for k, v in (kept.get("hardware") or {}).items() if k not in PRIVATE["hardware"]}
    config = dict(kept.get("config") or {})
    config["data"] = {k: v for k, v in (config.get("data") or {}).items() if k not in PRIVATE["data"]}
    origin = dict(kept.get("origin") or {})
    origin["set"] = [s for s in origin.get("set") or [] if not str(s).startswith("data.root")]
    origin["job"] = Path(str(origin.get("job", ""))).name
    return kept | {"config": config, "origin": origin}
