"""Rows of the tables as series that trackers take: names and values.

A series belongs to one cell, seed, method and request, ``seed-0/quickdrop/class-9`` (with a sweep its cell comes first;
what methods share is ``seed-0/shared``), so that a tracker shows methods beside each other. Its metrics are named after
phase and column: ``recover/retain_accuracy``, ``train/class_accuracy/3``, ``recover/loss_threshold/forget/auc``. The
step is the round of the phase. These names stay.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from qdsim.store import run_directory, storage, tables
from qdsim.store.storage import StoragePath

TRACKED = ("rounds", "classes", "membership")
"""Tables whose rows are tracked. Those of clients are many, those of stages are sums: both stay in the tables."""
ROUND_METRICS = tuple(
    column.name
    for column in tables.COLUMNS["rounds"]
    if column.type in (pa.float64(), pa.int64()) and column not in tables.KEYS
)
ATTACK_METRICS = ("member_rate", "auc", "tpr_at_1pct_fpr")


@dataclass(frozen=True)
class Series:
    """One cell, seed, method and request of a run."""

    cell: str
    seed: int
    method: str
    request: str

    @property
    def name(self) -> str:
        """The name that trackers show, with ``/`` between its parts."""
        parts = (self.cell, f"seed-{self.seed}", self.method, self.request)
        return "/".join(run_directory.file_name(part) for part in parts if part)


@dataclass(frozen=True)
class Points:
    """What is new of one round of a series."""

    series: Series
    phase: str
    round_number: int
    step: int
    """Rounds of the series before this one, over its phases: for trackers that know one count alone."""
    time_s: float
    """When the rows were written, in seconds since 1970."""
    values: dict[str, float] = field(default_factory=dict)
    """By the names of metrics."""


def metrics(table: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that a row holds, by name; what was not measured is left out."""
    phase = row["phase"]
    if table == "rounds":
        found = {f"{phase}/{name}": row.get(name) for name in ROUND_METRICS}
    elif table == "classes":
        found = {f"{phase}/class_accuracy/{row['class']}": row["accuracy"]}
    else:
        about = f"{phase}/{row['attack']}/{row['subset']}"
        found = {f"{about}/{name}": row[name] for name in ATTACK_METRICS}
    return {name: float(value) for name, value in found.items() if value is not None}


class Reader:
    """Reads each part of a run's tables once, whether the run goes on or is over."""

    def __init__(self, run_dir: StoragePath):
        self._run_dir = run_dir
        self._seen: set[tuple[str, str]] = set()
        self._steps: dict[Series, dict[tuple[str, int], int]] = defaultdict(dict)

    def new(self) -> list[Points]:
        """Return what was written since the last time, one series after the other, in the order of their rounds."""
        rounds: dict[tuple[Series, str, int], dict[str, float]] = defaultdict(dict)
        times_s: dict[tuple[Series, str, int], float] = {}
        for table, row, written_s in self._new_rows():
            series = Series(row["cell"], row["seed"], row["method"], row["request"])
            key = (series, row["phase"], row["round"])
            rounds[key] |= metrics(table, row)
            times_s[key] = max(written_s, times_s.get(key, 0.0))
        began_s: dict[Series, float] = {}
        for key, written_s in times_s.items():
            began_s[key[0]] = min(written_s, began_s.get(key[0], written_s))
        ordered = sorted(rounds, key=lambda key: (began_s[key[0]], key[0].name, _rank(key[1]), key[2]))
        return [Points(*key, self._step(*key), times_s[key], rounds[key]) for key in ordered]

    def _new_rows(self) -> Iterator[tuple[str, dict[str, Any], float]]:
        for table in TRACKED:
            for path, rows in self._new_parts(table):
                written_s = storage.modified_s(path) if rows else 0.0
                for row in rows:
                    yield table, row, written_s

    def _new_parts(self, table: str) -> list[tuple[StoragePath, list[dict[str, Any]]]]:
        """Read the parts that were not seen; of a file that several were joined into, the rows of those."""
        found: list[tuple[StoragePath, list[dict[str, Any]]]] = []
        for path in run_directory.part_files(self._run_dir, table):
            if (table, path.stem) in self._seen:  # a round that was done again has the values that it had
                continue
            try:
                rows = run_directory.read_part(path, table).to_pylist()
            except FileNotFoundError:  # the parts were joined since they were listed
                return [*found, *self._new_parts(table)]
            if path.stem == run_directory.PACKED_PART:
                rows = [row for row in rows if not self._has_seen(table, row)]
            self._seen.add((table, path.stem))
            found.append((path, rows))
        return found

    def _has_seen(self, table: str, row: Mapping[str, Any]) -> bool:
        return any((table, stem) in self._seen for stem in run_directory.stems(row, table))

    def _step(self, series: Series, phase: str, number: int) -> int:
        known = self._steps[series]
        return known.setdefault((phase, number), len(known))


def _rank(phase: str) -> int:
    return tables.PHASES.index(phase) if phase in tables.PHASES else len(tables.PHASES)


def by_series(points: Iterable[Points]) -> dict[Series, list[Points]]:
    """Group points that belong together."""
    found: dict[Series, list[Points]] = defaultdict(list)
    for point in points:
        found[point.series].append(point)
    return found
