"""From run directories to tidy DataFrames. Bad input costs one line each, never the rest of the report.

``load(RUNS)`` takes run directories and folders that hold them. Each table is one DataFrame over all runs, with the
columns of ``qdsim/tables.py`` and, so that runs can be told apart and compared, ``job``, ``dataset``, ``setting``
(equal for runs that differ in seeds and methods alone), ``partition`` (hash of who got which samples) and ``asked``
(the request as the job has it: ``client:random`` where ``request`` names the client that a seed drew).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from qdsim.errors import BadInput
from qdsim.results import read_manifest
from qdsim.summary import asked_names
from qdsim.tables import COLUMNS, SCHEMA_VERSION

ADDED = ("job", "dataset", "setting", "partition", "asked")
READERS = 8
"""Threads that read parts: opening thousands of small files is mostly waiting."""
VARIES = {
    "": {"name", "about", "seeds", "methods", "requests", "membership"},
    "cluster": {"gpus_per_client", "clients_per_actor", "placement_timeout_s", "local_gpus", "local_cpus"},
    "data": {"root", "download"},
    "synthetic": {"gallery"},
}
"""Keys of a job in which runs of one setting may differ: none of them moves a number of a given seed and method."""


@dataclass(frozen=True)
class Results:
    """What was found: a DataFrame for each table, one for the runs, and what was wrong."""

    runs: pd.DataFrame
    """One row per run: ``run_id, path, job, dataset, clients, split, profile, state, setting, sound``."""
    tables: dict[str, pd.DataFrame]
    manifests: dict[str, dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    """One line for each thing that could not be read or was left out of comparisons."""

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return a table by its name: ``results.rounds``."""
        tables: dict[str, pd.DataFrame] = self.__dict__.get("tables", {})
        if name not in tables:
            raise AttributeError(name)
        return tables[name]

    @property
    def sound(self) -> set[str]:
        """Runs that may be compared: finished, whole, and nobody missing in any round."""
        return set(self.runs.loc[self.runs["sound"], "run_id"]) if len(self.runs) else set()


def load(runs: str | Path | Iterable[str | Path]) -> Results:
    """Read runs. A folder that is no run itself stands for all runs in it."""
    given = [runs] if isinstance(runs, str | Path) else list(runs)
    problems: list[str] = []
    manifests: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    parts: dict[str, list[pa.Table]] = {table: [] for table in COLUMNS}
    for path in _run_directories([Path(p) for p in given], problems):
        run_id = path.name
        if run_id in manifests:
            problems.append(f"{path}: a run of this name was read already; this copy is left out")
            continue
        try:
            manifest = read_manifest(path)
        except BadInput as error:
            problems.append(f"{path}: {error.allowed}")
            continue
        found, faults, older = _read_run(path)
        if not found:
            problems.append(f"{path}: no tables there; left out")
            continue
        manifests[run_id] = manifest
        faults += _incomplete(manifest, found)
        problems += [f"{run_id}: {said}" for said in [*older, *faults]]
        rows.append(_run_row(path, manifest) | {"sound": not faults})
        for table, data in found.items():
            parts[table].append(data)
    tables = {table: _frame(table, parts[table], manifests) for table in COLUMNS}
    names = ["run_id", "path", "job", "dataset", "clients", "split", "profile", "state", "setting", "sound"]
    return Results(pd.DataFrame(rows, columns=names), tables, manifests, problems)


def _run_directories(given: Sequence[Path], problems: list[str]) -> list[Path]:
    found: list[Path] = []
    for path in given:
        if (path / "manifest.json").is_file():
            found.append(path)
            continue
        if not path.is_dir():
            problems.append(f"{path}: no such folder")
            continue
        inside = sorted(p.parent for p in path.glob("*/manifest.json"))
        if not inside and (path / "tables").is_dir():
            problems.append(f"{path}: tables but no manifest.json, so it cannot be told what was run; left out")
        elif not inside:
            problems.append(f"{path}: no runs there (no manifest.json in it or in a folder of it)")
        found += inside
    return found


def _read_run(path: Path) -> tuple[dict[str, pa.Table], list[str], list[str]]:
    """Read all tables of a run as they are now; say what could not be read, and which columns an older run lacks."""
    found: dict[str, pa.Table] = {}
    faults: list[str] = []
    lacking: list[str] = []
    version = str(SCHEMA_VERSION)
    for table in COLUMNS:
        folder = path / "tables" / table
        files = sorted(p for p in folder.glob("*.parquet") if not p.name.startswith(".")) if folder.is_dir() else []
        if not files:
            if table != "images":  # older runs have none
                faults.append(f"no table {table}")
            continue
        with ThreadPoolExecutor(READERS) as pool:
            read = list(pool.map(_read_part, files))
        damaged = [file.name for file, part in zip(files, read, strict=True) if isinstance(part, str)]
        reasons = [part for part in read if isinstance(part, str)]
        if damaged:
            others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            faults.append(f"tables/{table}/{damaged[0]}{others}: {reasons[0]}; left out")
        whole = [part for part in read if not isinstance(part, str)]
        if whole:
            data = pa.concat_tables(whole, promote_options="permissive")
            found[table], missing = _with_all_columns(data, table)
            if missing:
                version = (data.schema.metadata or {}).get(b"qdsim.schema_version", b"?").decode()
                lacking += [f"{table}.{name}" for name in missing]
    older = [f"its tables have schema version {version}, not {SCHEMA_VERSION}, and lack {', '.join(lacking)}"]
    return found, faults, older if lacking else []


def _read_part(path: Path) -> pa.Table | str:
    """Read a part, or say in a few words why not."""
    try:
        data = pq.ParquetFile(path, memory_map=False).read()
    except (pa.ArrowException, OSError, ValueError):
        return "not a whole Parquet file"
    if b"qdsim.schema_version" not in (data.schema.metadata or {}):
        return "a Parquet file that qdsim did not write"
    return data


def _with_all_columns(data: pa.Table, table: str) -> tuple[pa.Table, list[str]]:
    """Return the table's columns in their order and types; those that an older version lacks are null."""
    missing = [name for name, _, _ in COLUMNS[table] if name not in data.column_names]
    columns = []
    for name, kind, _ in COLUMNS[table]:
        columns.append(pa.nulls(len(data), kind) if name in missing else data[name].cast(kind))
    return pa.table(columns, names=[name for name, _, _ in COLUMNS[table]]), missing


def _incomplete(manifest: dict[str, Any], found: dict[str, pa.Table]) -> list[str]:
    """Say why a run may not be compared with others."""
    faults = []
    if manifest.get("state") != "done":
        faults.append(f"the run is {manifest.get('state')}, not done: shown by itself, left out of comparisons")
    if "rounds" in found:
        rounds = found["rounds"].to_pandas()
        short = rounds[rounds["participants_received"] < rounds["participants_expected"]]
        if len(short):
            first = short.iloc[0]
            faults.append(
                f"{len(short)} of {len(rounds)} rounds miss participants, first {first['method']} {first['phase']} "
                f"{first['round']} with {first['participants_received']} of {first['participants_expected']}: "
                "left out of comparisons"
            )
    return faults


def _run_row(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    config = manifest.get("config") or {}
    partition = config.get("partition") or {}
    return {
        "run_id": path.name,
        "path": str(path),
        "job": config.get("name", path.name),
        "dataset": (config.get("data") or {}).get("dataset", ""),
        "clients": partition.get("clients"),
        "split": "IID" if partition.get("kind") == "iid" else f"α = {partition.get('alpha')}",
        "profile": (manifest.get("origin") or {}).get("profile") or "",
        "state": manifest.get("state", ""),
        "setting": setting(manifest),
    }


def setting(manifest: dict[str, Any]) -> str:
    """Return a short hash of everything that moves a number of a given seed, method and request."""
    config = manifest.get("config") or {}
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in VARIES[""]:
            continue
        kept[key] = (
            {k: v for k, v in value.items() if k not in VARIES.get(key, set())} if isinstance(value, dict) else value
        )
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _frame(table: str, parts: list[pa.Table], manifests: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Join a table's runs and say of each row where it belongs."""
    names = [name for name, _, _ in COLUMNS[table]]
    if not parts:
        return pd.DataFrame(columns=[*names, *ADDED])
    frame: pd.DataFrame = pa.concat_tables(parts).to_pandas(strings_to_categorical=True)
    keys = ["run_id", "cell", "seed", "request"]
    places = frame[keys].drop_duplicates().astype({"run_id": str, "cell": str, "request": str})
    rows = places.itertuples(index=False, name=None)
    added = [_place(manifests[run_id], cell, seed, request) for run_id, cell, seed, request in rows]
    places[list(ADDED)] = pd.DataFrame(added, index=places.index, columns=list(ADDED)).astype("category")
    merged = frame.astype({"run_id": str, "cell": str, "request": str}).merge(places, on=keys, how="left")
    return merged.astype({"run_id": "category", "cell": "category", "request": "category"})


def _place(manifest: dict[str, Any], cell: str, seed: int, request: str) -> tuple[str, str, str, str, str]:
    config = manifest.get("config") or {}
    cells = {c.get("cell"): c for c in manifest.get("cells") or []}
    partition = ((cells.get(cell) or {}).get("partitions") or {}).get(str(seed), "")
    asked = asked_names(manifest).get((cell, seed, request), request)
    dataset = (config.get("data") or {}).get("dataset", "")
    return config.get("name", ""), dataset, setting(manifest), partition[:12], asked
