"""A run as Python sees it: its manifest, its tables as DataFrames, its result and its report."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsim.api import display, report
from qdsim.errors import BadInput
from qdsim.store import run_directory, tables
from qdsim.store.storage import StoragePath

if TYPE_CHECKING:  # reading is what needs them, and a job is checked without
    import pandas as pd
    import pyarrow as pa

WITHIN_ROUND = ("client_id", "class", "attack", "subset")
"""What orders the rows of one round, where a table has it."""


class Run:
    """A run directory, finished or going on; every access reads what is there by now.

    ``run.rounds`` and the other tables are DataFrames of their own: change them as you like.
    """

    def __init__(self, path: str | StoragePath):
        self.path = run_directory.find_run(path) if isinstance(path, str) else path
        self._whole: dict[str, pa.Table] = {}
        """Tables of a finished run: they do not change."""
        run_directory.read_manifest(self.path)

    @property
    def manifest(self) -> dict[str, Any]:
        """What the run is: configuration, versions, hardware, state."""
        return run_directory.read_manifest(self.path)

    @property
    def run_id(self) -> str:
        """The name that its rows carry."""
        return str(self.manifest.get("run_id") or self.path.resolve().name)

    @property
    def state(self) -> str:
        """Return running, done, failed or interrupted."""
        return str(self.manifest.get("state", ""))

    @property
    def rounds(self) -> pd.DataFrame:
        """A row for each round: accuracies, clocks, samples, bytes, hash of the model."""
        return self.table("rounds")

    @property
    def stages(self) -> pd.DataFrame:
        """A row for each phase: totals, rounds, storage."""
        return self.table("stages")

    @property
    def classes(self) -> pd.DataFrame:
        """A row for each round and class: test accuracy."""
        return self.table("classes")

    @property
    def clients(self) -> pd.DataFrame:
        """A row for each round and participant: samples, loss, compute and matching time, place."""
        return self.table("clients")

    @property
    def partitions(self) -> pd.DataFrame:
        """A row for each client and class: real and synthetic samples."""
        return self.table("partitions")

    @property
    def membership(self) -> pd.DataFrame:
        """A row for each attack and subset; empty unless the job asks for an attack."""
        return self.table("membership")

    @property
    def images(self) -> pd.DataFrame:
        """A row for each synthetic image of the gallery; empty unless the job asks for one."""
        return self.table("images")

    def table(self, name: str) -> pd.DataFrame:
        """Return a table by its name, in the order in which the job lists cells, seeds, methods and requests."""
        import pandas as pd

        if name not in tables.COLUMNS:
            raise BadInput("table", name, f"allowed: {', '.join(tables.COLUMNS)}")
        manifest = self.manifest
        data = self._whole.get(name)
        if data is None:
            data = run_directory.read_table(self.path, name)
            if data is None:  # a run of an older version has no images
                return pd.DataFrame(columns=tables.names(name))
            if manifest.get("state") == "done":
                self._whole[name] = data
        frame: pd.DataFrame = data.to_pandas()
        ranks = _ranks(manifest)
        sorted_by = [key for key in ranks if key in frame] + [
            key for key in ("round", *WITHIN_ROUND) if key in frame.columns
        ]
        places = pd.DataFrame({key: _places(frame[key], ranks.get(key)) for key in sorted_by})
        return frame.loc[places.sort_values(sorted_by, kind="stable").index].reset_index(drop=True)

    def summary(self) -> pd.DataFrame:
        """Return the result table: each method's stages, means over seeds, with speed-ups against retraining."""
        from qdsim.store import summary

        return summary.stage_table(self.path)

    def report(self, out: str | Path | None = None) -> Path:
        """Make every table and figure that this run covers, and return the page; by default in the run directory."""
        folder = Path(out) if out is not None else self._local_folder("report")
        return report.write(self.path, folder, most_workers=1).page

    def _local_folder(self, name: str) -> Path:
        return self.path / name if isinstance(self.path, Path) else Path(f"{self.path.name}-{name}")

    def __repr__(self) -> str:
        """Say what was run, and how far it is."""
        return f"Run({str(self.path)!r}: {', '.join(self._described())})"

    def _repr_html_(self) -> str:
        head = f"<b>{html.escape(self.path.name)}</b>: {html.escape(', '.join(self._described()))}"
        return f"<p>{head}</p>\n{display.result_html(self.path)}\n<p>{html.escape(str(self.path))}</p>"

    def _described(self) -> list[str]:
        config = self.manifest.get("config") or {}
        methods: Sequence[str] = self.manifest.get("method_names") or config.get("methods") or []
        clients = (config.get("partition") or {}).get("clients")
        seeds = config.get("seeds") or []
        return [
            self.state,
            str((config.get("data") or {}).get("dataset", "")),
            f"{clients} clients",
            f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}",
            *methods,
        ]


def _ranks(manifest: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the values of the keys of rows, in the order in which a job runs through them."""
    config, cells = manifest.get("config") or {}, manifest.get("cells") or []
    requests = [label for cell in cells for labels in (cell.get("requests") or {}).values() for label in labels]
    return {
        "cell": [cell.get("cell", "") for cell in cells],
        "seed": list(config.get("seeds") or []),
        "method": ["shared", *(manifest.get("method_names") or config.get("methods") or [])],
        "request": ["", *dict.fromkeys(requests)],
        "phase": list(tables.PHASES),
    }


def _places(values: pd.Series[Any], order: list[Any] | None) -> pd.Series[Any]:
    """Return each value's place in the order, after it where it is none of it; a number is its own place."""
    if order is None:
        return values
    return values.map({value: i for i, value in enumerate(order)}).fillna(len(order))
