"""What the README says can be done, is there."""

import re
import shlex
import tomllib
from itertools import pairwise

from qdsim.experiment import config
from qdsim.store import tables
from tests.conftest import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")


def test_the_test_command_is_the_one_that_ci_runs():
    """Word for word, but for pip's -q."""
    command = re.search(r"## Test it\n\n```bash\n(.*?)\n```", README, re.DOTALL).group(1)
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in script.replace("pip install -q", "pip install")


def test_every_job_and_file_that_the_readme_names_exists():
    """Jobs, modules and folders."""
    for path in set(re.findall(r"(?:jobs|cluster|qdsim|analysis)/[\w/]+\.(?:toml|py|md)", README)):
        assert (PROJECT / path).exists(), path


def test_every_job_that_the_readme_runs_is_a_valid_one():
    """Each ``qdsim run`` line loads with its profile and its --set."""
    lines = [line.split("#")[0] for line in README.splitlines() if line.startswith("qdsim run")]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line)
        values = {flag: [b for a, b in pairwise(words) if a == flag] for flag in ("--set", "--profile")}
        config.load(PROJECT / words[2], profile=next(iter(values["--profile"]), None), overrides=values["--set"])


def test_the_functions_in_the_table_of_the_paper_exist():
    """`module.function` of the algorithms."""
    from qdsim.algorithms import distillation, quickdrop

    named = re.findall(r"`(distillation|quickdrop)\.(\w+)`", README)
    assert len(named) >= 5
    for module, function in named:
        assert callable(getattr({"distillation": distillation, "quickdrop": quickdrop}[module], function))


def test_the_tables_that_the_readme_lists_are_written():
    """Each named table has a schema."""
    section = README.split("## Results")[1].split("## On a cluster")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert listed
    assert set(listed) <= set(tables.COLUMNS)


def test_running_needs_no_extra():
    """Extras are for tests and development; everything that qdsim imports is a plain dependency."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plain = {re.split(r"[\[>]", d)[0] for d in project["dependencies"]}
    assert plain >= {"ray", "torch", "torchvision", "pandas", "pyarrow", "pydantic", "rich", "typer", "scikit-learn"}
    assert plain >= {"matplotlib", "jinja2"}
    assert set(project["optional-dependencies"]) == {"test", "dev"}
