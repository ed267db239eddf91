"""The report as one HTML page: everything inlined, works from a file, on a phone and in dark mode."""

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from analysis import measures, side_by_side
from analysis import report as reports
from analysis.load import Results, load
from analysis.outputs import Figure, Table
from analysis.report import Report, Section
from qdsim.errors import BadInput
from qdsim.store.run_directory import printable
from qdsim.store.storage import StoragePath

TITLE = "qdsim report"
SHOWN = 0.8
"""Of a picture's own size: sharp, all in one size of letters, and the widest fits the page."""
IN_PYTHON = "(given in Python)"
"""As a manifest names a job that is no file."""
NOTHING = "nothing"
COMPARED_OPENLY = 4
"""Runs up to which the comparison is unfolded."""


@dataclass(frozen=True)
class Written:
    """A report that was written: its page, and what is to be said of it."""

    page: Path
    report: Report
    runs: int

    @property
    def problems(self) -> list[str]:
        """What was wrong with the runs, a line each."""
        return [printable(problem) for problem in self.report.problems]

    @property
    def lines(self) -> list[str]:
        """What was made and what was not; the last line is the page."""
        tables, figures = reports.count(self.report.sections)
        made = f"{tables} tables and {figures} figures from {self.runs} run{'' if self.runs == 1 else 's'}"
        missing = [f"not made: {title}; it needs {fix}" for title, fix in self.report.missing]
        return [made, *missing, str(self.page)]


def write(
    runs: str | StoragePath | Iterable[str | StoragePath],
    out: Path,
    *,
    most_workers: int = reports.MOST_WORKERS,
    tell: Callable[[str], None] = lambda title: None,
) -> Written:
    """Make every table and figure that the runs cover, and the page, in a folder.

    A process that is started imports the program's main module again: a script of the user's wants one worker.
    """
    given = [runs] if isinstance(runs, str | StoragePath) else list(runs)
    results = load(given)
    if results.runs.empty:
        why = "; ".join(map(printable, results.problems)) or "no run was named"
        raise BadInput("RUNS", " ".join(map(str, given)), f"nothing to report: {why}")
    planned = reports.plan(results)
    try:
        reports.write(planned, out, tell, most_workers=most_workers)
        (out / "index.html").write_text(render(planned, results), encoding="utf-8")
    except OSError as error:
        raise BadInput("--out", str(out), f"cannot be written to: {error.strerror}") from None
    return Written(out / "index.html", planned, len(results.runs))


def render(report: Report, results: Results) -> str:
    """Return the page."""
    template = (files("analysis") / "page.html.j2").read_text(encoding="utf-8")
    tables, figures = reports.count(report.sections)
    compared = side_by_side.make(results)
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        title=TITLE,
        sections=[_section(section) for section in report.sections],
        runs=_runs(results, compared.chosen if compared else []),
        compared=compared,
        compared_openly=len(results.runs) <= COMPARED_OPENLY,
        tables=tables,
        figures=figures,
        missing=report.missing,
        problems=report.problems,
    )


def _runs(results: Results, chosen: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the table of the runs, newest first."""
    apart = side_by_side.apart_in_job(results)
    found = results.runs.sort_values("started", ascending=False, kind="stable").to_dict("records")
    for run in found:
        manifest = results.manifests[run["run_id"]]
        origin, config = manifest.get("origin") or {}, manifest.get("config") or {}
        profile = [f"profile {origin['profile']}"] if origin.get("profile") else []
        changed = origin.get("changed", origin.get("set")) or []
        run["changed"] = [*profile, *(printable(str(text)) for text in changed)]
        run["unchanged"] = _unchanged(origin)
        run["apart"] = apart[run["run_id"]]
        run["seeds"] = len(config.get("seeds") or [])
        run["chosen"] = run["run_id"] in chosen
        run["state"] = run["state"] if run["sound"] or run["state"] != "done" else "done, not whole"
    return [{str(key): value for key, value in run.items()} for run in found]


def _unchanged(origin: dict[str, Any]) -> str:
    """Return what is said of a run's job where nothing is known to be changed in it."""
    if origin.get("job") == IN_PYTHON and not origin.get("changed"):
        return "given in Python"
    if "changed" not in origin:  # of a version that kept no more than the options
        return "nothing by option"
    return NOTHING if origin["changed"] is not None else "own job file"


def _section(section: Section) -> dict[str, Any]:
    blocks = [_block(item, written) for item, written in zip(section.items, section.files, strict=True)]
    headline = next((block for block in blocks if block["role"] == "headline"), None)
    return {
        "name": section.name or section.title,
        "about": section.about,
        "caveats": section.caveats,
        "sentence": _unbroken(section.verdict.sentence) if section.verdict else "",
        "headline": headline,
        "table": section.verdict.html() if section.verdict and headline else "",
        "blocks": [block for block in blocks if block is not headline],
    }


def _unbroken(sentence: str) -> str:
    """Keep a number with its unit, and a name in one piece, where lines break."""
    return sentence.replace(" %", "\u00a0%").replace(" s ", "\u00a0s ").replace("-Set", "-\u2060Set")


def _block(item: Table | Figure, written: list[Path]) -> dict[str, Any]:
    block: dict[str, Any] = {
        "title": item.label or item.title,
        "caption": item.caption,
        "notes": item.notes,
        "files": [path.name for path in written],
        "role": item.role if isinstance(item, Table) else "",
    }
    if isinstance(item, Table):
        block |= {"table": item.html(), "meanings": measures.meanings(item.columns)}
    else:
        png = next(path for path in written if path.suffix == ".png").read_bytes()
        width_px = int.from_bytes(png[16:20], "big")  # where every PNG has it
        block |= {"image": base64.b64encode(png).decode(), "width_px": round(SHOWN * width_px)}
        block["has_photographs"] = item.has_photographs
    return block
