"""A run as a few small files, to be shared or kept: one Parquet file a table, and the manifest without its machine."""

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from analysis.load import read_tables
from qdsim.errors import BadInput
from qdsim.store import completeness
from qdsim.store.run_directory import PACKED_PART, identity_of, manifest_text, read_manifest
from qdsim.store.tables import schema

PRIVATE = ("host", "system", "root", "earlier")
"""Keys of a manifest that say where a run was made rather than what it was."""
FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^/\s\"']+/)*")
"""The folders of an absolute path."""


def pack(run_dir: Path, out: Path) -> Path:
    """Write a finished run into ``out`` under its own name; ``analysis.load`` reads it as it reads any run."""
    manifest = read_manifest(run_dir)
    if manifest.get("state") != "done":
        raise BadInput("RUN", str(run_dir), f"it is {manifest.get('state')}; only a finished run is packed")
    owner = identity_of(run_dir, manifest)
    found, faults, _ = read_tables(run_dir, owner)
    for said in [*faults, *completeness.faults(manifest, found)]:
        raise BadInput("RUN", str(run_dir), said)
    name = owner.run_id
    packed, temporary = out / name, out / f".{name}.tmp"
    if packed.exists():
        raise BadInput("--out", str(packed), "is there already; parts are never mixed")
    try:
        for table, data in found.items():
            (temporary / "tables" / table).mkdir(parents=True, exist_ok=True)
            path = temporary / "tables" / table / f"{PACKED_PART}.parquet"
            pq.write_table(data.cast(schema(table, name)), path, compression="zstd")
        (temporary / "manifest.json").write_text(manifest_text(_without_machine(manifest)), encoding="utf-8")
        temporary.rename(packed)
    except OSError as error:
        raise BadInput("--out", str(out), f"cannot be written to: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return packed


def _without_machine(value: Any) -> Any:
    """Leave out what is private, and of every path keep the last name."""
    if isinstance(value, dict):
        return {key: _without_machine(kept) for key, kept in value.items() if key not in PRIVATE}
    if isinstance(value, list):
        return [_without_machine(kept) for kept in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value
