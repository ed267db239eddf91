"""The report of runs, as ``qdsim report``, ``qdsim.report`` and ``Run.report`` make it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qdsim.errors import BadInput
from qdsim.store import run_directory
from qdsim.store.storage import StoragePath

if TYPE_CHECKING:
    from analysis.page import Written

INSTALLED_IN = Path(__file__).resolve().parents[2]
"""Where ``qdsim`` and ``analysis`` lie beside each other."""


def write(
    runs: str | StoragePath | Iterable[str | StoragePath],
    out: Path,
    *,
    most_workers: int | None = None,
    tell: Callable[[str], None] = lambda title: None,
) -> Written:
    """Write the report; on ``most_workers`` processes, by default as many as pay. ``latest`` is the newest run."""
    given = [runs] if isinstance(runs, str | StoragePath) else list(runs)
    paths = [run_directory.find_run(run) if isinstance(run, str) else run for run in given]
    with _analysis_of_this_installation():
        from analysis import page, report

        return page.write(paths, out, most_workers=most_workers or report.MOST_WORKERS, tell=tell)


@contextmanager
def _analysis_of_this_installation() -> Iterator[None]:
    """See to it that ``analysis`` is the one beside qdsim: many a project has a folder of that name."""
    known = sys.modules.get("analysis")
    place = Path(str(getattr(known, "__file__", None) or INSTALLED_IN / "analysis" / "__init__.py")).resolve()
    if place.parent.parent != INSTALLED_IN:
        why = "is loaded as the module analysis, which the report needs: run qdsim report in a terminal, or rename it"
        raise BadInput("analysis", str(place), why)
    sys.path.insert(0, str(INSTALLED_IN))  # the processes that draw figures are given it as well
    try:
        yield
    finally:
        sys.path.remove(str(INSTALLED_IN))
