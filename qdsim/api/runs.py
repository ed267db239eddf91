"""Several runs: a line for each, or their results beside each other with what differs in their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qdsim.errors import BadInput, QdsimError, as_toml
from qdsim.experiment.status import state_of
from qdsim.store import run_directory
from qdsim.store.run_directory import first_line
from qdsim.store.storage import StoragePath

if TYPE_CHECKING:
    import pandas as pd

MOST_RUNS = len(ascii_uppercase)
ENDS = ("recover", "unlearn")
"""The phase that a method's result is read after: the first of these that it has."""


@dataclass(frozen=True)
class RunLine:
    """A run as a list of runs shows it."""

    path: StoragePath
    state: str
    """That of the manifest; ``gone`` where no live process owns it; ``damaged`` where it cannot be read."""
    job: str
    started_at: str
    result: str
    """What the methods have reached, or what is wrong with the run."""


def listed(folder: StoragePath) -> list[RunLine]:
    """Return a line for each run in a folder, newest first; one that is damaged has a line that says so."""
    return [_line(run) for run in run_directory.newest_first(folder)]


def _line(run_dir: StoragePath) -> RunLine:
    try:
        manifest = run_directory.read_manifest(run_dir)
        state = state_of(run_dir, manifest)
    except QdsimError as error:
        said = error.allowed if isinstance(error, BadInput) else str(error)
        return RunLine(run_dir, "damaged", "", "", said)
    config = manifest.get("config")
    job = str(config.get("name", "")) if isinstance(config, dict) else ""
    started_at = str(manifest.get("started_at", ""))[: len("2026-11-18T12:00")].replace("T", " ")
    try:
        result = result_of(run_dir) or str(manifest.get("error", ""))
    except (QdsimError, OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        said = error.allowed if isinstance(error, BadInput) else first_line(error)
        return RunLine(run_dir, "damaged", job, started_at, said)
    return RunLine(run_dir, state, job, started_at, result)


def result_of(run_dir: StoragePath) -> str:
    """Return each method's F-Set and R-Set after recovery, of the first request; nothing where none is served yet."""
    from qdsim.store import summary  # which brings pandas

    table = summary.stage_table(run_dir)
    if table.empty:
        return ""
    titles = summary.method_titles(run_dir)
    groups = list(table.groupby(["cell", "request"], sort=False))
    (cell, request), rows = groups[0]
    parts = []
    for method, stages in rows[rows["method"] != "shared"].groupby("method", sort=False):
        ended = stages.set_index("phase").reindex(ENDS).dropna(subset=["rounds_run"])
        if len(ended):
            scores = ended.iloc[0]
            parts.append(
                f"{titles.get(str(method), method)} {scores['forget_accuracy']:.1%}/{scores['retain_accuracy']:.1%}"
            )
    more = f" (and {len(groups) - 1} more)" if len(groups) > 1 else ""
    return f"{f'{request} {cell}'.rstrip()}: {', '.join(parts)}{more}"


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other, by the letters A, B and so on."""

    runs: dict[str, StoragePath]
    settings: dict[str, dict[str, str]]
    """Keys in which they differ, each with the value that every run has."""
    stages: pd.DataFrame
    """Their result tables one after the other, with a column ``run``."""
    membership: pd.DataFrame
    """What attacks found, likewise; empty where no job asked for one."""


def compared(run_dirs: Sequence[StoragePath]) -> Comparison:
    """Read runs and set them beside each other."""
    import pandas as pd

    from qdsim.store import summary

    if len(run_dirs) > MOST_RUNS:
        raise BadInput("RUN", len(run_dirs), f"at most {MOST_RUNS} runs are shown beside each other")
    runs = dict(zip(ascii_uppercase, run_dirs, strict=False))
    tables: dict[str, list[pd.DataFrame]] = {"stages": [], "membership": []}
    settings = {}
    for letter, run_dir in runs.items():
        summary.check_whole(run_dir)
        tables["stages"].append(summary.stage_table(run_dir).assign(run=letter))
        tables["membership"].append(summary.membership_table(run_dir).assign(run=letter))
        settings[letter] = _settings(run_directory.read_manifest(run_dir))
    keys = dict.fromkeys(key for own in settings.values() for key in own)
    beside = {key: {letter: own.get(key, "-") for letter, own in settings.items()} for key in keys}
    differing = {key: values for key, values in beside.items() if len(set(values.values())) > 1}
    joined = {}
    for name, own in tables.items():
        filled = [table for table in own if len(table)]
        joined[name] = pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()
    return Comparison(runs, differing, joined["stages"], joined["membership"])


def _settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a run's job with their values as TOML, and which qdsim ran it on what."""
    config = run_directory.flat(manifest.get("config") or {})
    found = {key: "-" if value is None else as_toml(value) for key, value in config.items()}
    versions, hardware = manifest.get("versions") or {}, manifest.get("hardware") or {}
    return found | {
        "(engine)": str(manifest.get("engine", "-")),
        "(qdsim)": str(versions.get("qdsim", "-")),
        "(torch)": str(versions.get("torch", "-")),
        "(host)": str(hardware.get("host", "-")),
    }
