"""The report as one HTML page: everything inlined, works from a file, on a phone and in dark mode."""

import base64
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from analysis.load import Results
from analysis.outputs import Table
from analysis.report import Report, Section, count

TITLE = "qdsim report"


def render(report: Report, results: Results) -> str:
    """Return the page."""
    template = (files("analysis") / "page.html.j2").read_text(encoding="utf-8")
    tables, figures = count(report.sections)
    sections = [{"title": section.title, "blocks": _blocks(section)} for section in report.sections]
    runs = results.runs.to_dict("records")
    for run in runs:
        config = results.manifests[run["run_id"]].get("config") or {}
        run["seeds"] = ", ".join(map(str, config.get("seeds") or []))
    page = Environment(autoescape=True, trim_blocks=True).from_string(template)
    return page.render(
        title=TITLE,
        sections=sections,
        runs=runs,
        tables=tables,
        figures=figures,
        missing=report.missing,
        problems=report.problems,
    )


def _blocks(section: Section) -> list[dict[str, Any]]:
    blocks = []
    for item, written in zip(section.items, section.files, strict=True):
        block: dict[str, Any] = {"title": item.title, "notes": item.notes, "files": [path.name for path in written]}
        if isinstance(item, Table):
            block["table"] = item.html()
        else:
            block["image"] = _inline(written)
        blocks.append(block)
    return blocks


def _inline(written: list[Path]) -> str:
    png = next(path for path in written if path.suffix == ".png")
    return base64.b64encode(png.read_bytes()).decode()
