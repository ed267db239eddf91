"""The run directory: ``manifest.json``, ``partitions/`` and ``tables/<table>/*.parquet``.

Rows stream in as small finished files: written under a name that begins with a dot, flushed to disk, then
renamed. A reader therefore sees whole parts only, at any moment. Parts are only ever added; a round that is done again
after a crash replaces its own.
"""

import glob
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qdsim import arrays, tables
from qdsim.errors import BadInput


def new_run_directory(out: Path, name: str) -> Path:
    """Make ``<out>/<name>-<id>``; the id sorts by time and never meets an existing run."""
    run_dir = out / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        (run_dir / "tables").mkdir(parents=True)
    except OSError as error:
        raise BadInput("--out", str(out), f"cannot be written to: {error.strerror}") from None
    return run_dir


def newest_run(out: Path, name: str) -> Path | None:
    """Return the last run of a job under ``out``, or None; run ids sort by time."""
    runs = sorted(path.parent for path in out.glob(f"{glob.escape(name)}-*/manifest.json"))
    own = [run for run in runs if (read_manifest(run).get("config") or {}).get("name") == name]
    return own[-1] if own else None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _rename(temporary, path)


def _rename(temporary: Path, path: Path) -> None:
    os.replace(temporary, path)
    arrays.sync_folder(path.parent)


def file_name(name: str) -> str:
    """Return a name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9_.=,+-]", "-", name)


class Manifest:
    """What the run is: configuration, versions, hardware, state. Rewritten whole at each change."""

    def __init__(self, run_dir: Path, content: dict[str, Any]):
        self._path = run_dir / "manifest.json"
        self._content = {"started_at": _now()} | content
        self.update(state="running")

    @staticmethod
    def reopen(run_dir: Path, **changes: Any) -> "Manifest":
        """Go on with a run: the start stays, each resumption is noted, the last end is taken back."""
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
        write_atomically(self._path, text.encode() + b"\n")

    def finish(self, state: str, **changes: Any) -> None:
        """Record the end: done, failed or interrupted."""
        self.update(state=state, finished_at=_now(), **changes)


def read_manifest(run_dir: Path) -> dict[str, Any]:
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

    def __init__(self, run_dir: Path):
        self._run_id = run_dir.name
        self._folder = run_dir / "tables"
        self._schemas = {table: tables.schema(table, self._run_id) for table in tables.COLUMNS}
        for table in tables.COLUMNS:
            (self._folder / table).mkdir(parents=True, exist_ok=True)
            for left in (self._folder / table).glob(".*.tmp"):  # by an attempt that was cut off
                left.unlink(missing_ok=True)
            self._write(table, "00-schema", [])

    def has(self, table: str, part: str) -> bool:
        """Tell whether a part has been written."""
        return self._path(table, part).exists()

    def read(self, table: str, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part of this run, as they were appended; one that is damaged or gone is named."""
        path = self._path(table, part)
        try:
            found = pq.ParquetFile(path, memory_map=False).read().drop_columns("run_id").to_pylist()
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise arrays.damaged(path, error, "run without --resume to start anew") from None
        rows: list[dict[str, Any]] = found
        return rows

    def _path(self, table: str, part: str) -> Path:
        return self._folder / table / f"{file_name(part)}.parquet"

    def append(self, table: str, part: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows as one part; the same part written again replaces itself."""
        for row in rows:
            unknown = row.keys() - set(self._schemas[table].names)
            if unknown:
                raise ValueError(f"table {table} has no columns {sorted(unknown)}")
        self._write(table, part, [{**row, "run_id": self._run_id} for row in rows])

    def _write(self, table: str, part: str, rows: list[dict[str, Any]]) -> None:
        path = self._path(table, part)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        data = pa.Table.from_pylist(rows, schema=self._schemas[table])
        with open(temporary, "wb") as file:
            pq.write_table(data, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
