"""Which file a job's name means: a path, or the stem of a job that comes with qdsim.

The job files lie in ``jobs/`` at the top of the project; a wheel carries them as ``qdsim/jobs``. Both are found from
where this package lies, so a stem means the same job in any folder.
"""

import difflib
import os
from pathlib import Path

from qdsim.errors import BadInput

PACKAGE = Path(__file__).parent.parent
PLACES = (PACKAGE / "jobs", PACKAGE.parent / "jobs")
"""Where an installed package has its jobs, and where a checkout has them."""


def shipped() -> dict[str, Path]:
    """Return the jobs that come with qdsim, by their stems."""
    folder = next((place for place in PLACES if place.is_dir()), PLACES[0])
    return {path.stem: path for path in in_folder(folder)}


def in_folder(folder: Path) -> list[Path]:
    """Return the job files of a folder, in the order of their names."""
    return sorted(folder.glob("*.toml"))


def find(named: Path) -> Path:
    """Return the file that is meant: the one of that path if there is one, else the shipped job of that stem.

    A name with a folder or ``.toml`` in it can only be a path; whether it can be read shows when it is read.
    """
    if not _may_be_a_stem(named) or (os.path.exists(named) and not os.path.isdir(named)):
        return named
    try:
        return shipped()[named.name]
    except KeyError:
        raise missing(named) from None


def missing(named: Path) -> BadInput:
    """Return the refusal of a name that is no file: a stem is told the shipped jobs, a path the files beside it."""
    jobs = shipped()
    if _may_be_a_stem(named):
        close = difflib.get_close_matches(named.name, jobs, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        there = ", ".join(jobs) or "none"
        return BadInput("JOB", str(named), f"no such file, and no job of that name; {hint}jobs of qdsim: {there}")
    beside = ", ".join(str(path) for path in in_folder(named.parent)) or "no job file there"
    hint = f"; the job that comes with qdsim is named {named.stem}" if named.stem in jobs else ""
    return BadInput("JOB", str(named), f"no such file; found: {beside}{hint}")


def _may_be_a_stem(named: Path) -> bool:
    return named.name == str(named) and named.suffix != ".toml"
