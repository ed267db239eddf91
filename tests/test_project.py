"""What the files at the top of the project say agrees with the rest of it."""

import re
import tomllib

import yaml

from qdsim import __version__
from tests.conftest import PROJECT

PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def test_what_tests_share_is_type_checked():
    """Every module under tests that is no test, by name, so that plain ``mypy`` checks it."""
    shared = {
        ".".join(path.relative_to(PROJECT).with_suffix("").parts)
        for path in (PROJECT / "tests").rglob("*.py")
        if not path.name.startswith(("test_", "__init__"))
    }
    assert set(PYPROJECT["tool"]["mypy"]["modules"]) == shared
