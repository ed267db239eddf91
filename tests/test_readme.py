"""What the README and the pages behind it say can be done, is there."""

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

from qdsim.experiment import config, job_files
from qdsim.store import tables
from qdsim.tracking.trackers import TRACKERS
from tests.conftest import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")
PAGES = [
    PROJECT / name
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "analysis/README.md", "cluster/README.md")
]
PAGES += sorted((PROJECT / "docs").glob("*.md"))
ALL_PAGES = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_the_test_command_is_the_one_that_ci_runs():
    """Word for word, but for pip's -q."""
    command = re.search(r"## Test it\n\n```bash\n(.*?)\n```", README, re.DOTALL).group(1)
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in script.replace("pip install -q", "pip install")


def test_every_job_and_file_that_the_pages_name_exists():
    """Jobs, modules and folders."""
    for path in set(
        re.findall(r"(?:jobs|cluster|qdsim|analysis|tests|docs)/[\w/]+\.(?:toml|py|md|png|ipynb)", ALL_PAGES)
    ):
        assert (PROJECT / path).exists(), path


def test_the_tree_of_the_architecture_has_every_file_of_the_package():
    """Each module of qdsim is named in its own room, so the map does not fall behind the house."""
    tree = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[3]
    rooms = {"": ""}
    room = ""
    for line in tree.splitlines()[2:]:
        found = re.match(r"  (\w+)/ ", line)
        room = found[1] if found else room
        rooms[room] = rooms.get(room, "") + line
    for path in sorted((PROJECT / "qdsim").rglob("*.py")):
        parts = path.relative_to(PROJECT / "qdsim").parts
        if path.stem in ("__init__", "__main__") or parts[0] == "bench":
            continue
        assert path.name in rooms[parts[0] if len(parts) > 1 else ""], path


def test_links_between_pages_lead_somewhere():
    """Every relative link of a page names a file that is there."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_job_that_the_pages_run_is_a_valid_one():
    """Each ``qdsim run`` line loads with its profile and its --set."""
    lines = [line.split("#")[0] for line in ALL_PAGES.splitlines() if line.startswith("qdsim run ")]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line)
        values = {flag: [b for a, b in pairwise(words) if a == flag] for flag in ("--set", "--profile")}
        job = PROJECT / words[2] if words[2].endswith(".toml") else job_files.find(Path(words[2]))
        config.load(job, profile=next(iter(values["--profile"]), None), overrides=values["--set"])


def test_the_functions_in_the_table_of_the_paper_exist():
    """`module.function` of the algorithms."""
    from qdsim.algorithms import distillation, quickdrop

    named = re.findall(r"`(distillation|quickdrop)\.(\w+)`", ALL_PAGES)
    assert len(named) >= 5
    for module, function in named:
        assert callable(getattr({"distillation": distillation, "quickdrop": quickdrop}[module], function))


def test_the_tables_that_are_listed_are_written():
    """Each named table has a schema."""
    section = (PROJECT / "docs" / "results.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert listed
    assert set(listed) <= set(tables.COLUMNS)


def test_running_needs_no_extra():
    """Extras are trackers, searches, tests and development; all else that qdsim imports is a plain dependency."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plain = {re.split(r"[\[>]", d)[0] for d in project["dependencies"]}
    assert plain >= {"ray", "torch", "torchvision", "pandas", "pyarrow", "pydantic", "rich", "typer", "scikit-learn"}
    assert plain >= {"matplotlib", "jinja2"}
    assert set(project["optional-dependencies"]) == {*TRACKERS, "tune", "test", "dev"}
