"""``qdsim verify A B``: are two runs the same, value by value?

Ignored are columns that end in ``_s`` and :data:`IGNORED`: clocks and places. Nothing else. Runs of an older schema
version are compared in today's words. Two that are equal and not whole are refused: the same is missing in both, or a
part of one lies in the other.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qdsim.store import completeness
from qdsim.store.storage import StoragePath
from qdsim.store.tables import COLUMNS, names

IGNORED = ("run_id", "node_id", "gpu_id", "peak_memory_bytes", "reused")
KEYS = ("cell", "seed", "method", "request", "phase", "round", "client_id", "class", "attack", "subset", "synthetic")
"""What names a row: those of them that its table has."""


def difference(first: StoragePath, second: StoragePath) -> str | None:
    """Return the first difference between two runs in a line, or None where there is none."""
    one, other = completeness.examine(first), completeness.examine(second)
    for table in COLUMNS:
        found = _different(table, _frame(one.tables, table), _frame(other.tables, table))
        if found is not None:
            return found
    for examined in (one, other):
        if examined.problem is not None:
            raise examined.problem
    return None


def _frame(run: Mapping[str, pa.Table], table: str) -> pd.DataFrame:
    """Return a table; one that is not there has no rows."""
    frame: pd.DataFrame = run[table].to_pandas() if table in run else pd.DataFrame(columns=names(table))
    return frame


def _different(table: str, a: pd.DataFrame, b: pd.DataFrame) -> str | None:
    columns = [c for c in dict.fromkeys([*a.columns, *b.columns]) if not c.endswith("_s") and c not in IGNORED]
    lacking = [c for c in columns if (c in a) != (c in b)]
    if lacking:
        return f"table {table}: column {lacking[0]} is in one run only"
    keys = [c for c in KEYS if c in columns]
    if a.empty and b.empty:
        return None
    if a.empty or b.empty:
        return f"table {table}: {len(a)} rows against {len(b)}"
    a, b = (frame[columns].sort_values(keys, kind="stable").reset_index(drop=True) for frame in (a, b))
    for name, frame in (("first", a), ("second", b)):
        twice = frame.duplicated(keys)
        if twice.any():
            return f"table {table}: the {name} run has two rows of {_name(frame[twice].iloc[0], keys)}"
    merged = a[keys].merge(b[keys], on=keys, how="outer", indicator=True)
    alone = merged[merged["_merge"] != "both"]
    if len(alone):
        row = alone.iloc[0]
        run = "first" if row["_merge"] == "left_only" else "second"
        return f"table {table}: only the {run} run has a row of {_name(row, keys)} ({len(a)} rows against {len(b)})"
    for column in columns:
        unequal = ~((a[column] == b[column]) | (a[column].isna() & b[column].isna()))
        if unequal.any():
            at = int(unequal.to_numpy().argmax())
            place = _name(a.iloc[at], keys)
            values = [
                value.item() if isinstance(value, np.generic) else value for value in (a[column][at], b[column][at])
            ]
            if isinstance(values[0], bytes) and isinstance(values[1], bytes):
                return f"table {table}, {place}: {column} differs"
            return f"table {table}, {place}: {column} is {values[0]!r} against {values[1]!r}"
    return None


def _name(row: pd.Series, keys: list[str]) -> str:
    named: dict[str, Any] = {key: row[key] for key in keys}
    named = {key: f"of {len(value)} bytes" if isinstance(value, bytes) else value for key, value in named.items()}
    return ", ".join(f"{key} {value}" for key, value in named.items() if value not in ("", None))
