"""What the files at the top of the project say agrees with the rest of it."""

import re
import tomllib

import pytest
import yaml

from qdsim import __version__
from tests.conftest import PROJECT
from tests.minimum import minimums

PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def test_what_tests_share_is_type_checked():
    """Every module under tests that is no test, by name, so that plain ``mypy`` checks it."""
    shared = {
        ".".join(path.relative_to(PROJECT).with_suffix("").parts)
        for path in (PROJECT / "tests").rglob("*.py")
        if not path.name.startswith(("test_", "__init__"))
    }
    assert set(PYPROJECT["tool"]["mypy"]["modules"]) == shared


def test_a_commit_is_checked_as_ci_checks_it():
    """The hooks run the last lines of CI's script, and fetch nothing."""
    config = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [hook["entry"] for hook in hooks] == script[-3:]


def test_the_citation_names_the_software_and_the_paper():
    """Both, since one that is preferred would stand for the other; the paper by the README's DOI."""
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["title"] == PYPROJECT["project"]["name"]
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert "preferred-citation" not in citation
    (paper,) = citation["references"]
    assert f"https://doi.org/{paper['doi']}" in (PROJECT / "README.md").read_text(encoding="utf-8")
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Dhasade", "Ding", "Guo", "Kermarrec", "Vos", "Wu"]


def test_the_changelog_has_this_version():
    """What is not released comes first, then the versions, newest first, with their days."""
    headings = re.findall(r"(?m)^## (.*)$", (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_every_dependency_has_a_lower_bound_to_test():
    """``python -m tests.minimum`` installs it."""
    found = minimums(PYPROJECT["project"]["dependencies"])
    assert "torch==2.10" in found
    assert "ray==2.55" in found  # ray[default]
    assert len(found) == len(PYPROJECT["project"]["dependencies"])
    with pytest.raises(ValueError, match="NAME>=VERSION"):
        minimums(["torch"])
