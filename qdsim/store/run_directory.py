"""The run directory: ``manifest.json``, ``partitions/`` and ``tables/<table>/*.parquet``.

Rows stream in as small finished files: written under a name that begins with a dot, flushed to disk, then
renamed. A reader therefore sees whole parts only, at any moment. Parts are only ever added; a round that is done again
after a crash replaces its own. Parts of an older schema version are read in today's words, and a run that goes on has
those of its parts that use old ones written anew.

A part belongs to one run and to one place in it: its name follows from its rows. A copy under another name, or a part
of another run, is refused by whoever reads it; :mod:`qdsim.store.completeness` says whether all parts are there.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qdsim.errors import BadInput
from qdsim.store import arrays, storage, tables
from qdsim.store.storage import StoragePath

SCHEMA_PART = "00-schema"
"""The part of zero rows that each table begins with."""
PACKED_PART = "all"
"""The one part of a table whose parts were joined."""
ROUND_TABLES = ("rounds", "clients", "classes")
"""Tables of which every round writes a part."""
MAY_BE_EMPTY = ("clients", "images", "membership")
"""A round may have no participants (FedEraser's stored one), a federation no synthetic images, and a model that has
forgotten the last class of a sequence nobody whose membership could be asked for."""
PLACE = ("cell", "seed", "method", "request", "phase", "round", "attack")
"""The columns, where a table has them, that say which part a row belongs in."""
JOINED_FROM = 256
"""A table of so many parts is joined into one when the run is done: opening them takes longer than reading them."""
START_ANEW = "run without --resume to start a new run"
FORMAT = 2
"""Of the files of a run. Since 2 arrays say inside whose they are, and all rows have the run's first name."""
LATEST = "latest"
"""What may be written instead of a run's name."""
DEFAULT_OUT = "runs"
ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
"""What follows the job's name in that of a run directory."""


class Misplaced(ValueError):
    """A part that does not belong where it lies."""


@dataclass(frozen=True)
class RunIdentity:
    """The name by which a run's files know it; its directory may have been renamed."""

    run_id: str
    format: int = FORMAT
    resumed: bool = False

    @property
    def unnamed(self) -> bool:
        """Its arrays may be of the version that wrote no owner into them."""
        return self.format < FORMAT

    def owns(self, run_id: object) -> bool:
        """Tell whether rows under this name are its own: format 1 renamed a run that was resumed under a new name."""
        return run_id == self.run_id or (self.format < FORMAT and self.resumed)


def identity_of(run_dir: StoragePath, manifest: Mapping[str, Any]) -> RunIdentity:
    """Return by which name the files of a run know it."""
    version = manifest.get("format", 1)
    resumed = bool(manifest.get("resumed_at"))
    run_id = str(manifest.get("run_id") or run_dir.resolve().name)
    return RunIdentity(run_id, version if isinstance(version, int) else 1, resumed)


def identity(run_dir: StoragePath) -> RunIdentity:
    """Return by which name the files of a run know it, one that has no manifest yet by that of its directory."""
    if not (run_dir / "manifest.json").exists():
        return RunIdentity(run_dir.resolve().name)
    return identity_of(run_dir, read_manifest(run_dir))


def new_run_directory(out: StoragePath, name: str) -> StoragePath:
    """Make ``<out>/<name>-<id>``; the id sorts by time and never meets an existing run."""
    run_dir = out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        (run_dir / "tables").mkdir(parents=True)
    except OSError as error:
        raise BadInput("--out", str(out), f"cannot be written to: {error.strerror or error}") from None
    return run_dir


def newest_run(out: StoragePath, name: str) -> StoragePath | None:
    """Return the run of a job under ``out`` that was started last, or None."""
    for run in newest_first(out, f"{name}-"):  # an older one may be broken: it is not asked for
        try:
            config = read_manifest(run).get("config") or {}
        except BadInput:
            if ID.fullmatch(run.name.removeprefix(f"{name}-")):  # else it is another job's, and none of our business
                raise
            continue
        if isinstance(config, dict) and config.get("name") == name:
            return run
    return None


def find_run(text: str) -> StoragePath:
    """Return the run that a path or a URI names; ``latest`` is the newest in ``runs``, ``DIR/latest`` that in DIR."""
    found = storage.folder(text)
    if found.name != LATEST or found.exists():
        return found
    parent = Path(DEFAULT_OUT) if text == LATEST else found.parent
    runs = newest_first(parent)
    if not runs:
        raise BadInput("RUN", text, f"there is no run in {parent}")
    return runs[0]


def newest_first(folder: StoragePath, begins: str = "") -> list[StoragePath]:
    """Return the run directories in a folder, the one that was started last first."""
    return sorted(runs_in(folder, begins), key=lambda run: (_started(run), run.name), reverse=True)


def _started(run_dir: StoragePath) -> str:
    """Return when a run was started, in its name or else in its manifest; its digits sort by time."""
    in_name = ID.search(run_dir.name)
    if in_name is not None:
        return re.sub(r"\D", "", in_name[0][: len("20261118-120000")])
    try:
        return re.sub(r"\D", "", str(read_manifest(run_dir).get("started_at", "")))[: len("20261118120000")]
    except BadInput:
        return ""


def runs_in(folder: StoragePath, begins: str = "") -> list[StoragePath]:
    """Return the run directories in a folder, by their names; a neighbour's that may not be looked into is none."""
    found = []
    for path in storage.inside(folder):
        with suppress(OSError):
            if path.name.startswith(begins) and (path / "manifest.json").exists():
                found.append(path)
    return found


def read_part(path: StoragePath, table: str, owner: RunIdentity | None = None) -> pa.Table:
    """Read one part of a table with its checksums, in today's words; raises as pyarrow does where it is damaged.

    Raises :class:`Misplaced` for a part that is not the owner's, where one is given, or lies under another name.
    """
    source = path if isinstance(path, Path) else pa.BufferReader(path.read_bytes())
    file = pq.ParquetFile(source, memory_map=False, page_checksum_verification=True)
    data = tables.upgrade(table, file.read(use_threads=False))  # parts are small, and threads may be scarce
    if owner is not None:
        check_place(data, table, path.stem, owner)
    return data


def check_place(data: pa.Table, table: str, stem: str, owner: RunIdentity) -> None:
    """Refuse a part that is another run's, or whose name is not that of its rows."""
    if not len(data):
        if stem not in (SCHEMA_PART, PACKED_PART) and table not in MAY_BE_EMPTY:
            raise Misplaced("has no rows")
        return
    gone = [column.name for column in tables.KEYS if column.name not in data.column_names]
    if gone:
        raise Misplaced(f"has no column {gone[0]}")
    foreign = [name for name in data["run_id"].unique().to_pylist() if not owner.owns(name)]
    if foreign:
        raise Misplaced(f"holds rows of the run {foreign[0]}, not of {owner.run_id}")
    if stem == PACKED_PART:
        return
    columns = [name for name in PLACE if name in data.column_names]
    for place in set(zip(*(data[name].to_pylist() for name in columns), strict=True)):
        names = stems(dict(zip(columns, place, strict=True)), table)
        if stem not in names:
            raise Misplaced(f"holds rows that belong in {names[0]}.parquet")


def stems(row: Mapping[str, Any], table: str) -> list[str]:
    """Return the names that the part of a row may have: in today's words, then in older ones."""
    phase = "" if table == "partitions" else row["phase"]
    part = part_name(row["cell"], row["seed"], row["method"], row["request"], phase)
    if table in ROUND_TABLES:
        part = round_stem(part, row["round"])
    if table != "membership":
        return [file_name(part)]
    older = [then for then, now in tables.RENAMED_ATTACKS.items() if now == row["attack"]]
    return [file_name(f"{part}-{attack}") for attack in (row["attack"], *older)]


def part_name(cell: str, seed: int, method: str, request: str, phase: str) -> str:
    """Return the name of a phase's part in a table; without a phase, that of the task or training."""
    return "-".join(name for name in (cell, f"seed-{seed}", method, request, phase) if name)


def read_parts(run_dir: StoragePath, table: str) -> list[tuple[StoragePath, pa.Table]]:
    """Read all parts of a table, whosever they are; a damaged one is named."""
    found = []
    for path in part_files(run_dir, table):
        try:
            found.append((path, read_part(path, table)))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadInput("RUN", str(path), f"cannot be read: {first_line(error)}") from None
    return found


def join(run_dir: StoragePath, table: str, parts: Sequence[tuple[StoragePath, pa.Table]]) -> pa.Table | None:
    """Return the rows of all parts; None where there is no part."""
    try:
        data = [part for _, part in parts]
        return pa.concat_tables(data, promote_options="permissive") if data else None
    except pa.ArrowException as error:
        why = f"the parts of tables/{table} do not fit together: {first_line(error)}"
        raise BadInput("RUN", str(run_dir), why) from None


def read_table(run_dir: StoragePath, table: str) -> pa.Table | None:
    """Read one table of a run, finished or not; None where the run has no such table.

    A part that is damaged or does not belong there is named.
    """
    owner, parts = identity(run_dir), read_parts(run_dir, table)
    for path, data in parts:
        try:
            check_place(data, table, path.stem, owner)
        except Misplaced as error:
            raise misplaced(path, error) from None
    return join(run_dir, table, parts)


def misplaced(path: StoragePath, error: Misplaced) -> BadInput:
    """Return the error that names a part and whose rows it holds."""
    return BadInput("file", str(path), f"{error}: it does not belong here; move it away, or put the run's own back")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def part_files(run_dir: StoragePath, table: str) -> list[StoragePath]:
    """Return the parts of a table of a run, those apart that are being written."""
    return storage.inside(run_dir / "tables" / table, "[!.]*.parquet")


def check_columns(data: pa.Table, table: str) -> None:
    """Refuse columns that no version has: checksums cover a part's values, not its schema."""
    known = {column.name: column.type for column in tables.COLUMNS[table]}
    odd = [field.name for field in data.schema if known.get(field.name) != field.type]
    if odd:
        raise ValueError(f"column {odd[0]!r} is none of this table's")


def check_folders(run_dir: StoragePath) -> None:
    """Refuse to write into a run of which a folder is a link: what is deleted there would be somebody else's."""
    if not isinstance(run_dir, Path):
        return
    for folder, names, _ in os.walk(run_dir):
        for name in names:
            path = Path(folder) / name
            if path.is_symlink():
                raise BadInput("RUN", str(path), "is a link to another folder; a run is written to in its own alone")


def clear_temporary(run_dir: StoragePath) -> None:
    """Delete what an attempt that was cut off has left half-written, anywhere in a run that is owned."""
    if isinstance(run_dir, Path):
        for path in run_dir.rglob(".*.tmp"):
            if path.is_file():
                path.unlink(missing_ok=True)


def join_parts(run_dir: StoragePath, check_owner: Callable[[], None] = lambda: None) -> None:
    """Join the parts of long tables of a finished run, each into one file of the same rows.

    The new folder takes the old one's place whole, so no row is there twice, at any moment, and where the system can
    exchange two names none is missing either. Where it cannot, a folder that a crash has left between its two names is
    put back when the run is resumed. An object store has no such exchange: there parts stay as they are.
    """
    if not isinstance(run_dir, Path):
        return
    for table in tables.COLUMNS:
        folder = run_dir / "tables" / table
        joined, before = (folder.with_name(f".{table}.{name}.tmp") for name in ("joined", "before"))
        if before.exists() and not folder.exists():
            before.rename(folder)
        for left in (joined, before):
            storage.remove(left)
        if len(part_files(run_dir, table)) < JOINED_FROM:
            continue
        data = read_table(run_dir, table)
        assert data is not None
        check_owner()
        joined.mkdir()
        for stem, rows in ((SCHEMA_PART, data.slice(0, 0)), (PACKED_PART, data)):
            _write_part(rows, joined / f"{stem}.parquet")
        check_owner()
        if not storage.exchange(joined, folder):
            folder.rename(before)
            joined.rename(folder)
        storage.sync(folder.parent)
        for left in (joined, before):
            storage.remove(left)


def rewrite_older_parts(run_dir: StoragePath) -> None:
    """Write those parts anew that use words of an older version, before a run goes on: a table has one set of words.

    A part of ``membership`` has the attack in its name, by which the run knows that it is there.
    """
    run_id = identity(run_dir).run_id
    for table in (*tables.RENAMED_COLUMNS, *tables.RENAMED_VALUES):
        words = {old: new for renamed in tables.RENAMED_VALUES.get(table, {}).values() for old, new in renamed.items()}
        for path in part_files(run_dir, table):
            data = read_part(path, table)
            if not 0 < tables.version(data) < tables.SCHEMA_VERSION:
                continue
            begins, dash, last = path.stem.rpartition("-")
            now = path.parent / f"{begins}{dash}{words.get(last, last)}.parquet"
            today = tables.schema(table, run_id)
            schema = pa.schema([today.field(name) for name in data.column_names], metadata=today.metadata)
            _write_part(data.cast(schema), now)
            if now.name != path.name:
                path.unlink()


def _write_part(data: pa.Table, path: StoragePath) -> None:
    with storage.writing(path) as file:
        pq.write_table(data, file, compression="zstd", write_page_checksum=True)


def round_stem(part: str, round_number: int) -> str:
    """Return the name of a round's part of a phase."""
    return f"{part}-{round_number:05d}"


def file_name(name: str) -> str:
    """Return a name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9_.=,+-]", "-", name)


class Manifest:
    """What the run is: configuration, versions, hardware, state. Rewritten whole at each change."""

    def __init__(self, run_dir: StoragePath, content: dict[str, Any], check_owner: Callable[[], None] = lambda: None):
        self._path = run_dir / "manifest.json"
        self._check_owner = check_owner
        self._content = {"started_at": _now(), "format": FORMAT} | content
        self.update(state="running")

    @staticmethod
    def reopen(run_dir: StoragePath, check_owner: Callable[[], None], changes: Mapping[str, Any]) -> "Manifest":
        """Resume a run: the start and the name stay, each resumption is noted, the last end is taken back."""
        content = read_manifest(run_dir)
        known = identity_of(run_dir, content)
        for key in ("finished_at", "exit_code", "error"):
            content.pop(key, None)
        content["resumed_at"] = [*content.get("resumed_at", []), _now()]
        then = {key: content.get(key) for key in ("engine", "origin", "versions", "hardware")}
        content["earlier"] = [*content.get("earlier", []), then]
        kept = {"run_id": known.run_id, "format": known.format}
        return Manifest(run_dir, {**content, **changes, **kept}, check_owner)

    def update(self, **changes: Any) -> None:
        """Change some entries and write the file, unless another process owns the run by now."""
        self._content.update(changes)
        self._check_owner()
        storage.write(self._path, manifest_text(self._content).encode())

    def note(self, key: str, entry: Any) -> None:
        """Add an entry to a list, unless it is there."""
        entries: Any = self._content.get(key, [])
        if entry not in entries:
            self.update(**{key: [*entries, entry]})

    def finish(self, state: str, **changes: Any) -> None:
        """Record the end: done, failed or interrupted."""
        self.update(state=state, finished_at=_now(), **changes)


def manifest_text(content: Mapping[str, Any]) -> str:
    """Return a manifest as it is written: with a checksum, or a changed digit in it would go unseen."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps({**plain, "sha256": _checksum(plain)}, indent=2, sort_keys=True) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(run_dir: StoragePath) -> dict[str, Any]:
    """Read a run's manifest, without what a terminal would take for an order."""
    path = run_dir / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput("RUN", str(run_dir), "no manifest.json there: not a run directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput("RUN", str(run_dir), f"its manifest.json cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise BadInput("RUN", str(run_dir), "its manifest.json holds no object")
    checksum = content.pop("sha256", None)  # those of older versions have none
    if checksum is not None and checksum != _checksum(content):
        why = "its manifest.json is not as it was written: put that back, or delete its sha256 if the change is meant"
        raise BadInput("RUN", str(run_dir), why)
    content = _printable(content)
    run_id = content.get("run_id")
    if run_id is not None and (not isinstance(run_id, str) or run_id[:1] in ("", ".") or "/" in run_id):
        raise BadInput("RUN", str(run_dir), f"the run_id in its manifest.json, {run_id!r}, is no name of a run")
    found: dict[str, Any] = content
    return found


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's configuration as keys of a job: ``train.rounds``; a sweep stays whole, and so do tables."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "sweep":
            found |= {f"{key}.{inner}": kept for inner, kept in value.items()}
        else:
            found[key] = value
    return found


def printable(text: str) -> str:
    """Return a text without what a terminal would take for an order; line breaks and tabs stay."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable(kept) for key, kept in value.items()}
    if isinstance(value, list):
        return [_printable(kept) for kept in value]
    return printable(value) if isinstance(value, str) else value


class TableWriter:
    """Adds parts to the tables of one run; ``check_owner`` is asked before each whether the run is still ours."""

    def __init__(self, run_dir: StoragePath, check_owner: Callable[[], None] = lambda: None):
        self._owner = identity(run_dir)
        self._check_owner = check_owner
        self._run_id = self._owner.run_id
        self._folder = run_dir / "tables"
        self._schemas = {table: tables.schema(table, self._run_id) for table in tables.COLUMNS}
        for table in tables.COLUMNS:
            (self._folder / table).mkdir(parents=True, exist_ok=True)
            for left in (self._folder / table).glob(".*.tmp"):  # by an attempt that was cut off
                left.unlink(missing_ok=True)
            self._write(table, SCHEMA_PART, [])

    def has(self, table: str, part: str) -> bool:
        """Tell whether a part has been written."""
        return self._path(table, part).exists()

    def read(self, table: str, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part of this run, as they were appended; one that is damaged or gone is named."""
        path = self._path(table, part)
        try:
            found = read_part(path, table, self._owner).drop_columns("run_id").to_pylist()
        except Misplaced as error:
            raise misplaced(path, error) from None
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise arrays.damaged(path, error, START_ANEW) from None
        rows: list[dict[str, Any]] = found
        return rows

    def round_row(self, part: str) -> dict[str, Any]:
        """Return the row of a round that was committed; the rows of its clients and classes must be there as well."""
        for table in ("clients", "classes"):
            if not self.has(table, part):
                raise BadInput("file", str(self._path(table, part)), f"is gone; {START_ANEW}")
        (row,) = self.read("rounds", part)
        return row

    def _path(self, table: str, part: str) -> StoragePath:
        return self._folder / table / f"{file_name(part)}.parquet"

    def append(self, table: str, part: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows as one part; the same part written again replaces itself."""
        for row in rows:
            unknown = row.keys() - set(self._schemas[table].names)
            if unknown:
                raise ValueError(f"table {table} has no columns {sorted(unknown)}")
        self._write(table, part, [{**row, "run_id": self._run_id} for row in rows])

    def _write(self, table: str, part: str, rows: list[dict[str, Any]]) -> None:
        data = pa.Table.from_pylist(rows, schema=self._schemas[table])
        self._check_owner()
        _write_part(data, self._path(table, part))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
