"""The run directory: ``manifest.json``, ``partitions/`` and ``tables/<table>/*.parquet``.

Rows stream in as small finished files: written under a name that begins with a dot, flushed to disk, then
renamed. A reader therefore sees whole parts only, at any moment. Parts are only ever added; a round that is done again
after a crash replaces its own. Parts of an older schema version are read in today's words, and a run that goes on has
those of its parts that use old ones written anew.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
START_ANEW = "run without --resume to start a new run"


def new_run_directory(out: StoragePath, name: str) -> StoragePath:
    """Make ``<out>/<name>-<id>``; the id sorts by time and never meets an existing run."""
    run_dir = out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        (run_dir / "tables").mkdir(parents=True)
    except OSError as error:
        raise BadInput("--out", str(out), f"cannot be written to: {error.strerror or error}") from None
    return run_dir


def newest_run(out: StoragePath, name: str) -> StoragePath | None:
    """Return the last run of a job under ``out``, or None; run ids sort by time."""
    runs = runs_in(out, f"{name}-")
    own = [run for run in runs if (read_manifest(run).get("config") or {}).get("name") == name]
    return own[-1] if own else None


def runs_in(folder: StoragePath, begins: str = "") -> list[StoragePath]:
    """Return the run directories in a folder, by their names; a neighbour's that may not be looked into is none."""
    found = []
    for path in storage.inside(folder):
        with suppress(OSError):
            if path.name.startswith(begins) and (path / "manifest.json").exists():
                found.append(path)
    return found


def read_part(path: StoragePath, table: str) -> pa.Table:
    """Read one part of a table with its checksums, in today's words; raises as pyarrow does where it is damaged."""
    source = path if isinstance(path, Path) else pa.BufferReader(path.read_bytes())
    data = pq.ParquetFile(source, memory_map=False, page_checksum_verification=True).read()
    return tables.upgrade(table, data)


def read_table(run_dir: StoragePath, table: str) -> pa.Table | None:
    """Read one table of a run, finished or not; None where the run has no such table. A damaged part is named."""
    parts = []
    for path in part_files(run_dir, table):
        try:
            parts.append(read_part(path, table))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadInput("RUN", str(path), f"cannot be read: {str(error).splitlines()[0]}") from None
    try:
        return pa.concat_tables(parts, promote_options="permissive") if parts else None
    except pa.ArrowException as error:
        why = f"the parts of tables/{table} do not fit together: {str(error).splitlines()[0]}"
        raise BadInput("RUN", str(run_dir), why) from None


def part_files(run_dir: StoragePath, table: str) -> list[StoragePath]:
    """Return the parts of a table of a run, those apart that are being written."""
    return storage.inside(run_dir / "tables" / table, "[!.]*.parquet")


def check_parts(run_dir: StoragePath) -> None:
    """Refuse to resume a run of which a part is damaged, or a round's rows are gone."""
    there: dict[str, set[str]] = {}
    ended: list[dict[str, Any]] = []
    for table in tables.COLUMNS:
        paths = part_files(run_dir, table)
        there[table] = {path.stem for path in paths}
        for path in paths:
            try:
                data = read_part(path, table)
                _check_columns(data, table)
                if table == "stages":
                    ended += [row | {"part": path.stem} for row in data.select(["rounds_run"]).to_pylist()]
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                raise arrays.damaged(path, error, START_ANEW) from None
    for row in ended:
        for table in ("rounds", "clients", "classes"):
            lost = [n for n in range(1, row["rounds_run"] + 1) if round_stem(row["part"], n) not in there[table]]
            if lost:
                path = run_dir / "tables" / table / f"{round_stem(row['part'], lost[0])}.parquet"
                raise BadInput("file", str(path), f"is gone, and with it rows of a finished round; {START_ANEW}")


def rewrite_older_parts(run_dir: StoragePath) -> None:
    """Write those parts anew that use words of an older version, before a run goes on: a table has one set of words.

    A part of ``membership`` has the attack in its name, by which the run knows that it is there.
    """
    for table in (*tables.RENAMED_COLUMNS, *tables.RENAMED_VALUES):
        words = {old: new for renamed in tables.RENAMED_VALUES.get(table, {}).values() for old, new in renamed.items()}
        for path in part_files(run_dir, table):
            data = read_part(path, table)
            if not 0 < tables.version(data) < tables.SCHEMA_VERSION:
                continue
            begins, dash, last = path.stem.rpartition("-")
            now = path.parent / f"{begins}{dash}{words.get(last, last)}.parquet"
            today = tables.schema(table, run_dir.name)
            schema = pa.schema([today.field(name) for name in data.column_names], metadata=today.metadata)
            _write_part(data.cast(schema), now)
            if now.name != path.name:
                path.unlink()


def _write_part(data: pa.Table, path: StoragePath) -> None:
    with storage.writing(path) as file:
        pq.write_table(data, file, compression="zstd", write_page_checksum=True)


def _check_columns(data: pa.Table, table: str) -> None:
    """Refuse columns that no version has: checksums cover a part's values, not its schema."""
    known = {column.name: column.type for column in tables.COLUMNS[table]}
    odd = [field.name for field in data.schema if known.get(field.name) != field.type]
    if odd:
        raise ValueError(f"column {odd[0]!r} is none of this table's")


def round_stem(part: str, round_number: int) -> str:
    """Return the name of a round's part of a phase."""
    return f"{part}-{round_number:05d}"


def file_name(name: str) -> str:
    """Return a name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9_.=,+-]", "-", name)


class Manifest:
    """What the run is: configuration, versions, hardware, state. Rewritten whole at each change."""

    def __init__(self, run_dir: StoragePath, content: dict[str, Any]):
        self._path = run_dir / "manifest.json"
        self._content = {"started_at": _now()} | content
        self.update(state="running")

    @staticmethod
    def reopen(run_dir: StoragePath, **changes: Any) -> "Manifest":
        """Resume a run: the start stays, each resumption is noted, the last end is taken back."""
        content = read_manifest(run_dir)
        for key in ("finished_at", "exit_code", "error"):
            content.pop(key, None)
        content["resumed_at"] = [*content.get("resumed_at", []), _now()]
        then = {key: content.get(key) for key in ("engine", "origin", "versions", "hardware")}
        content["earlier"] = [*content.get("earlier", []), then]
        return Manifest(run_dir, content | changes)

    def update(self, **changes: Any) -> None:
        """Change some entries and write the file."""
        self._content.update(changes)
        text = json.dumps(self._content, indent=2, sort_keys=True, default=str)
        storage.write(self._path, text.encode() + b"\n")

    def finish(self, state: str, **changes: Any) -> None:
        """Record the end: done, failed or interrupted."""
        self.update(state=state, finished_at=_now(), **changes)


def read_manifest(run_dir: StoragePath) -> dict[str, Any]:
    """Read a run's manifest."""
    path = run_dir / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput("RUN", str(run_dir), "no manifest.json there: not a run directory") from None
    except (OSError, ValueError) as error:
        raise BadInput("RUN", str(run_dir), f"its manifest.json cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise BadInput("RUN", str(run_dir), "its manifest.json holds no object")
    return content


class TableWriter:
    """Adds parts to the tables of one run."""

    def __init__(self, run_dir: StoragePath):
        self._run_id = run_dir.name
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
            found = read_part(path, table).drop_columns("run_id").to_pylist()
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
        _write_part(data, self._path(table, part))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
