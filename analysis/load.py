"""From run directories to tidy DataFrames. Bad input costs one line each, never the rest of the report.

``load(RUNS)`` takes run directories and folders that hold them. Each table is one DataFrame over all runs, in the order
of runs, cells, seeds, requests and phases, with the columns of ``qdsim/store/tables.py`` (a run of an older version is
read in today's words) and, so that runs can be told apart and compared, ``job``, ``dataset``, ``setting`` (equal for
runs that differ in seeds and methods alone), ``partition`` (hash of who got which samples) and ``asked`` (the request
as the job has it: ``client:random`` where ``request`` names the client that a seed drew).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qdsim.algorithms.methods import METHODS
from qdsim.errors import BadInput
from qdsim.store import completeness
from qdsim.store.run_directory import (
    Misplaced,
    RunIdentity,
    check_place,
    flat,
    identity_of,
    part_files,
    printable,
    read_manifest,
    read_part,
    runs_in,
)
from qdsim.store.storage import StoragePath, folder
from qdsim.store.summary import asked_names
from qdsim.store.tables import COLUMNS, PHASES, SCHEMA_VERSION, names

ADDED = ("job", "dataset", "setting", "partition", "asked")
MOST_KEYS = 3
"""Settings that a title names."""
READERS = 8
"""Threads that read parts: opening thousands of small files is mostly waiting."""
VARIES = {
    "": {"name", "about", "seeds", "methods", "requests", "membership", "sweep"},
    "cluster": {"gpus_per_client", "clients_per_actor", "placement_timeout_s", "local_gpus", "local_cpus"},
    "data": {"root", "download", "verify"},
    "synthetic": {"gallery"},
}
"""Keys in which runs of one setting may differ: none of them moves a number of a given cell, seed and method."""
RUN_COLUMNS = [
    *("run_id", "path", "job", "dataset", "clients", "split", "profile", "started", "state"),
    *("setting", "apart", "caveat", "other_scale", "sound"),
]
_STAGES = {"steps": 50, "batch_size": 256, "participation": 1.0, "stop": "rounds", "proximal": 0.0}
PAPER_SCALE: dict[str, Any] = {
    **{"train.rounds": 200, "unlearn.rounds": 1, "recover.rounds": 2, "relearn.rounds": 2},
    **{
        f"{phase}.{key}": value
        for phase in ("train", "unlearn", "recover", "relearn")
        for key, value in _STAGES.items()
    },
    **{"synthetic.scale": 100, "synthetic.steps": 1, "synthetic.batch": 256, "synthetic.finetune": 0},
    **{"model.kind": "convnet", "model.width": 128, "model.depth": 3, "data.size": None},
    **{f"{m.name}.{f.name}": f.default for m in METHODS.values() if m.settings for f in fields(m.settings)},
}
"""How large the paper's experiments are, beside their data and clients: whatever changes what a phase costs."""
MANY_CLIENTS = {"partition.clients": 100, "train.participation": 0.1, "recover.participation": 0.1}
"""What is otherwise with a hundred clients, of whom ten take part in a round."""


@dataclass(frozen=True)
class Results:
    """What was found: a DataFrame for each table, one for the runs, and what was wrong."""

    runs: pd.DataFrame
    """One row per run.

    ``sound``: it may be compared with others; ``caveat``: why not with the paper, or empty; ``other_scale``: the keys
    in which it is smaller or larger than the paper's; ``apart``: the settings that tell it from other runs of its job.
    """
    tables: dict[str, pd.DataFrame]
    manifests: dict[str, dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    """One line for each thing that could not be read or was left out of comparisons."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What was worked out of these tables before; they do not change."""

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return a table by its name: ``results.rounds``."""
        tables: dict[str, pd.DataFrame] = self.__dict__.get("tables", {})
        if name not in tables:
            raise AttributeError(name)
        return tables[name]

    @property
    def sound(self) -> "Results":
        """The runs that may be compared: finished, whole, and nobody missing in any round."""
        return self.only(self.runs.loc[self.runs["sound"].astype(bool), "run_id"])

    def only(self, runs: Iterable[str]) -> "Results":
        """Return some runs alone; what several of them hold of one job, seed, method and request, the newest's."""
        chosen = frozenset(runs)
        if chosen not in self.memo:
            self.memo[chosen] = self._restricted(chosen)
        found: Results = self.memo[chosen]
        return found

    def _restricted(self, chosen: frozenset[str]) -> "Results":
        tables = {name: _newest(table[table["run_id"].isin(chosen)]) for name, table in self.tables.items()}
        manifests = {run: manifest for run, manifest in self.manifests.items() if run in chosen}
        return Results(self.runs[self.runs["run_id"].isin(chosen)], tables, manifests)


def load(runs: str | StoragePath | Iterable[str | StoragePath]) -> Results:
    """Read runs: paths or URIs. A folder that is no run itself stands for all runs in it."""
    given = [runs] if isinstance(runs, str | StoragePath) else list(runs)
    problems: list[str] = []
    manifests: dict[str, dict[str, Any]] = {}
    known: dict[str, _Known] = {}
    rows: list[dict[str, Any]] = []
    parts: dict[str, list[pa.Table]] = {table: [] for table in COLUMNS}
    for path in _run_directories([p if isinstance(p, StoragePath) else folder(p) for p in given], problems):
        try:
            manifest = read_manifest(path)
            owner = identity_of(path, manifest)
            run_id = owner.run_id
            row, places = _run_row(run_id, path, manifest), _Known.of(run_id, manifest)
        except BadInput as error:
            problems.append(f"{path}: {error.allowed}")
            continue
        except (TypeError, AttributeError, KeyError, ValueError):
            problems.append(f"{path}: its manifest.json is not one that qdsim writes; left out")
            continue
        if run_id in manifests:
            problems.append(f"{path}: run {run_id} was read already; this copy is left out")
            continue
        found, faults, older = read_tables(path, owner)
        if not found:
            problems.append(f"{path}: no tables there; left out")
            continue
        try:
            faults = faults or _incomplete(manifest, found)
        except (TypeError, AttributeError, KeyError, ValueError):
            problems.append(f"{path}: its manifest.json is not one that qdsim writes; left out")
            continue
        manifests[run_id], known[run_id] = manifest, places
        problems += [f"{run_id}: {said}" for said in [*older, *faults]]
        rows.append(row | {"sound": not faults})
        for table, data in found.items():
            own = pa.array([run_id] * len(data), pa.string())  # whatever the folder is called now
            parts[table].append(data.set_column(data.column_names.index("run_id"), "run_id", own))
    tables = {table: _frame(table, parts[table], known) for table in COLUMNS}
    _tell_apart(rows, manifests)
    return Results(pd.DataFrame(rows, columns=RUN_COLUMNS), tables, manifests, problems)


def _run_directories(given: Sequence[StoragePath], problems: list[str]) -> list[StoragePath]:
    found: list[StoragePath] = []
    for path in given:
        if (path / "manifest.json").exists():
            found.append(path)
            continue
        if not path.is_dir():
            problems.append(f"{path}: no such folder")
            continue
        inside = runs_in(path)
        if not inside and (path / "tables").is_dir():
            problems.append(f"{path}: tables but no manifest.json, so it cannot be told what was run; left out")
        elif not inside:
            problems.append(f"{path}: no runs there (no manifest.json in it or in a folder of it)")
        found += inside
    return found


def read_tables(path: StoragePath, owner: RunIdentity) -> tuple[dict[str, pa.Table], list[str], list[str]]:
    """Read all tables of a run as they are now; say what could not be read, and which columns an older run lacks."""
    found: dict[str, pa.Table] = {}
    faults: list[str] = []
    lacking: list[str] = []
    version = str(SCHEMA_VERSION)
    for table in COLUMNS:
        files = part_files(path, table)
        if not files:
            if table != "images":  # older runs have none
                faults.append(f"no table {table}")
            continue
        with ThreadPoolExecutor(READERS) as pool:
            read = list(pool.map(lambda file, table=table: _read_part(file, table, owner), files))
        damaged = [file.name for file, part in zip(files, read, strict=True) if isinstance(part, str)]
        reasons = [part for part in read if isinstance(part, str)]
        if damaged:
            others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            faults.append(f"tables/{table}/{damaged[0]}{others}: {reasons[0]}; left out")
        whole = [part for part in read if not isinstance(part, str)]
        if whole:
            found[table] = pa.concat_tables([data for data, _, _ in whole])
            missing = dict.fromkeys(name for _, lacks, _ in whole for name in lacks)
            lacking += [f"{table}.{name}" for name in missing]
            version = next((v for _, lacks, v in whole if lacks), version)
    older = [f"its tables have schema version {version}, not {SCHEMA_VERSION}, and lack {', '.join(lacking)}"]
    return found, faults, older if lacking else []


def _read_part(path: StoragePath, table: str, owner: RunIdentity) -> tuple[pa.Table, list[str], str] | str:
    """Read a part with the table's columns, those it lacks as nulls; or say in a few words why not."""
    try:
        data = read_part(path, table)
    except (pa.ArrowException, OSError, ValueError):
        return "not a whole Parquet file"
    version = (data.schema.metadata or {}).get(b"qdsim.schema_version", b"").decode()
    if not version:
        return "a Parquet file that qdsim did not write"
    try:
        check_place(data, table, path.stem, owner)
    except Misplaced as error:
        return printable(str(error))
    missing = [name for name in names(table) if name not in data.column_names]
    try:
        columns = [
            pa.nulls(len(data), column.type) if column.name in missing else data[column.name].cast(column.type)
            for column in COLUMNS[table]
        ]
    except pa.ArrowException:
        return f"its columns have other types than those of schema version {SCHEMA_VERSION}"
    return pa.table(columns, names=names(table)), missing, version


def _incomplete(manifest: dict[str, Any], found: dict[str, pa.Table]) -> list[str]:
    """Say why a run may not be compared with others."""
    if manifest.get("state") != "done":
        return [f"the run is {manifest.get('state')}, not done: shown by itself, left out of comparisons"]
    faults = [f"{said}: left out of comparisons" for said in completeness.faults(manifest, found)]
    if "rounds" in found:
        wanted = ["method", "phase", "round", "participants_received", "participants_expected"]
        rounds = found["rounds"].select(wanted).to_pandas()
        short = rounds[rounds["participants_received"] < rounds["participants_expected"]]
        if len(short):
            first = short.iloc[0]
            faults.append(
                f"{len(short)} of {len(rounds)} rounds miss participants, first {first['method']} {first['phase']} "
                f"{first['round']} with {first['participants_received']} of {first['participants_expected']}: "
                "left out of comparisons"
            )
    return faults


def _run_row(run_id: str, path: StoragePath, manifest: dict[str, Any]) -> dict[str, Any]:
    config = manifest.get("config") or {}
    partition, swept = config.get("partition") or {}, config.get("sweep") or {}
    split = "IID" if partition.get("kind") == "iid" else f"α = {partition.get('alpha')}"
    if {"partition.alpha", "partition.kind"} & set(swept):
        split = "α varied"
    clients = partition.get("clients")
    return {
        "run_id": run_id,
        "path": str(path),
        "job": str(config.get("name") or run_id),
        "dataset": str((config.get("data") or {}).get("dataset", "")),
        "clients": "varied" if "partition.clients" in swept else "?" if clients is None else str(clients),
        "split": split,
        "profile": (manifest.get("origin") or {}).get("profile") or "",
        "started": str(manifest.get("started_at") or "")[:16].replace("T", " "),
        "state": str(manifest.get("state", "")),
        "setting": setting(manifest),
        "apart": "",
        "caveat": _caveat(manifest),
        "other_scale": _other_scale(config),
    }


def _caveat(manifest: dict[str, Any]) -> str:
    """Say why a run's numbers are no measurement of the paper's experiment, whatever its job is called."""
    if (manifest.get("origin") or {}).get("profile") == "smoke":
        return "profile smoke: these numbers show that the job runs, and mean nothing else"
    return str((manifest.get("data") or {}).get("note") or "")


def setting(manifest: dict[str, Any]) -> str:
    """Return a short hash of everything that moves a number of a given cell, seed, method and request."""
    kept = _kept(manifest)
    data = manifest.get("data") or {}
    kept["images"] = {k: data.get(k) for k in ("train", "test", "mean", "std")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _kept(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a job's configuration that its setting is."""
    config = manifest.get("config") or {}
    swept = set(config.get("sweep") or {})
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in VARIES[""] or key in swept:
            continue
        if isinstance(value, dict):
            varies = VARIES.get(key, set()) | {name.split(".", 1)[1] for name in swept if name.startswith(f"{key}.")}
            value = {k: v for k, v in value.items() if k not in varies}
        kept[key] = value
    if config.get("sequence"):  # what went before moves what comes after
        kept["requests"] = config.get("requests")
    return kept


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys in which flat configurations differ, in the order of the jobs."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]


def value_text(value: Any) -> str:
    """Write a setting's value in a few letters."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict) and {"kind", "target"} <= set(value):  # a request
        return f"{value['kind']}:{value['target']}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {value_text(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or "none"
    return printable(str(value))


def _tell_apart(rows: list[dict[str, Any]], manifests: dict[str, dict[str, Any]]) -> None:
    """Write into ``apart`` what tells settings of a job from each other that are otherwise described alike."""
    alike: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        described = tuple(str(row[name]) for name in ("job", "dataset", "clients", "split", "profile"))
        alike.setdefault(described, {}).setdefault(row["setting"], []).append(row)
    for settings in alike.values():
        if len(settings) < 2:
            continue
        configs = [flat(_kept(manifests[own[0]["run_id"]])) for own in settings.values()]
        keys = differing(configs)
        texts = [_apart(keys, config) for config in configs]
        for own, text in zip(settings.values(), texts, strict=True):
            same = texts.count(text) > 1  # other data under the same name, or more keys than are named
            started = f"started {max(row['started'] for row in own)}"
            for row in own:
                row["apart"] = ", ".join(filter(None, (text, started if same else "")))


def _apart(keys: Sequence[str], config: dict[str, Any]) -> str:
    said = [f"{k} = {value_text(config[k])}" if k in config else f"{k} swept" for k in keys[:MOST_KEYS]]
    return ", ".join([*said, *([f"{len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else [])])


def _other_scale(config: dict[str, Any]) -> str:
    known, swept = flat(config), config.get("sweep") or {}
    scale = PAPER_SCALE | (MANY_CLIENTS if known.get("partition.clients") == MANY_CLIENTS["partition.clients"] else {})
    other = [key for key, value in scale.items() if key in known and key not in swept and known[key] != value]
    if known.get("relearn.rounds") == 0:  # nothing is relearned, at whatever size
        other = [key for key in other if not key.startswith("relearn.")]
    return _apart(other, known)


def _frame(table: str, parts: list[pa.Table], known: dict[str, "_Known"]) -> pd.DataFrame:
    """Join a table's runs, say of each row where it belongs, and put them in order."""
    if not parts:
        return pd.DataFrame(columns=[*names(table), *ADDED])
    data = pa.concat_tables(parts)
    texts = [column.name for column in COLUMNS[table] if column.type == pa.string()]
    frame: pd.DataFrame = data.to_pandas(categories=texts)
    keys = ["run_id", "cell", "seed", "request"]
    places = frame[keys].drop_duplicates().astype({"run_id": str, "cell": str, "request": str})
    rows = places.itertuples(index=False, name=None)
    added = [known[run].place(cell, int(seed), request) for run, cell, seed, request in rows]
    columns = pd.DataFrame(added, index=places.index, columns=[*ADDED, "cell_rank"])
    places[[*ADDED, "cell_rank"]] = columns.astype({name: "category" for name in ADDED})
    frame = frame.astype({"run_id": str, "cell": str, "request": str}).merge(places, on=keys, how="left")
    frame = frame.astype({"run_id": "category", "cell": "category", "request": "category"})
    phase = pd.Categorical(frame["phase"], categories=PHASES).codes
    position = np.array([_position(str(name)) for name in frame["request"].cat.categories])[frame["request"].cat.codes]
    numbers = [np.asarray(frame[name]) for name in ("round", "seed", "cell_rank")]
    method, run = np.asarray(frame["method"].cat.codes), np.asarray(frame["run_id"].cat.codes)
    # the last is the first to sort by
    order = np.lexsort([numbers[0], np.asarray(phase), position, method, numbers[1], numbers[2], run])
    return frame.iloc[order].drop(columns="cell_rank").reset_index(drop=True)


def _position(request: str) -> int:
    """Return a request's position in its sequence, 0 without one."""
    first = request.split(":")[0]
    return int(first) if first.isdigit() else 0


@dataclass(frozen=True)
class _Known:
    """What a manifest says of its rows."""

    job: str
    dataset: str
    setting: str
    partitions: dict[tuple[str, int], str]
    asked: dict[tuple[str, int, str], str]
    cells: list[str]

    @staticmethod
    def of(run_id: str, manifest: dict[str, Any]) -> "_Known":
        config = manifest.get("config") or {}
        partitions = {}
        for cell in manifest.get("cells") or []:
            for seed, sha in (cell.get("partitions") or {}).items():
                partitions[str(cell.get("cell", "")), int(seed)] = str(sha)[:12]
        return _Known(
            str(config.get("name") or run_id),
            str((config.get("data") or {}).get("dataset", "")),
            setting(manifest),
            partitions,
            asked_names(manifest),
            [str(cell.get("cell", "")) for cell in manifest.get("cells") or []],
        )

    def place(self, cell: str, seed: int, request: str) -> tuple[str, str, str, str, str, int]:
        """Return what a row is given, with its cell's place in the sweep."""
        asked = self.asked.get((cell, seed, request), request)
        rank = self.cells.index(cell) if cell in self.cells else len(self.cells)
        return self.job, self.dataset, self.setting, self.partitions.get((cell, seed), ""), asked, rank


def _newest(table: pd.DataFrame) -> pd.DataFrame:
    """Of rows that several runs have of the same thing, keep those of the newest run; run ids sort by time."""
    if table["run_id"].nunique() < 2:
        return table
    keys = ["job", "setting", "cell", "partition", "seed", "method", "asked"]
    pairs = table[[*keys, "run_id"]].drop_duplicates()
    pairs = pairs.assign(run_id=pairs["run_id"].astype(str)).sort_values("run_id")
    newest = pairs.drop_duplicates(keys, keep="last")
    if len(newest) == len(pairs):
        return table
    kept = table.assign(run_id=table["run_id"].astype(str)).merge(newest, on=[*keys, "run_id"])
    return kept.astype({"run_id": "category"})
