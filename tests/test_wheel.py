"""What is installed from a wheel is whole: code, jobs, data files, types and the licence."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from qdsim import __version__
from tests.conftest import PROJECT

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "qdsim", "analysis", "jobs")
"""All that a wheel is made of; the image and ``ray up`` copy the same."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A wheel of a copy of the project, unpacked: building one leaves files beside the sources."""
    copy, out = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (PROJECT / name).is_dir():
            shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy(PROJECT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)]
    done = subprocess.run(pip, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("qdsim-*.whl")
    zipfile.ZipFile(wheel).extractall(out / "unpacked")
    return out / "unpacked"


def python(installed, cwd, *arguments):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


def test_a_wheel_holds_all_files_and_no_others(installed):
    """Every module, the jobs inside the package, what the analysis reads, the marks of typed code, the licence."""
    found = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    info = f"qdsim-{__version__}.dist-info"
    modules = {
        str(path.relative_to(PROJECT)) for name in ("qdsim", "analysis") for path in (PROJECT / name).rglob("*.py")
    }
    jobs = {f"qdsim/jobs/{path.name}" for path in (PROJECT / "jobs").glob("*.toml")}
    others = {"analysis/paper.csv", "analysis/page.html.j2", "analysis/py.typed", "qdsim/py.typed"}
    assert len(jobs) >= 17
    assert {name for name in found if not name.startswith(info)} == modules | jobs | others
    licence = (installed / info / "licenses" / "LICENSE").read_bytes()
    assert licence == (PROJECT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in (installed / info / "METADATA").read_text(encoding="utf-8")


def test_an_installed_command_finds_its_jobs(installed, tmp_path):
    """From a folder that knows nothing of the project."""
    done = python(installed, tmp_path, "-m", "qdsim", "jobs")
    assert done.returncode == 0, done.stderr
    assert all(path.stem in done.stdout for path in (PROJECT / "jobs").glob("*.toml"))


def test_an_installed_package_sends_its_own_job(installed, tmp_path):
    """The copy that is submitted has the job where its command looks for it, and all jobs inside the package."""
    code = (
        "from pathlib import Path\nfrom qdsim.experiment import job_files\nfrom qdsim.ray_engine.jobs import pack\n"
        "print(pack(job_files.find(Path('quickstart')), Path('.'))[0])"
    )
    done = python(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    sent = tmp_path / done.stdout.strip()
    assert sent == tmp_path / "jobs" / "quickstart.toml"
    assert sent.read_bytes() == (PROJECT / "jobs" / "quickstart.toml").read_bytes()
    assert (tmp_path / "qdsim" / "jobs" / "quickstart.toml").exists()


def test_the_wheel_is_built_as_pyproject_says():
    """Building needs what the tests have, so that no network is used."""
    content = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(content["build-system"]["requires"]) <= set(content["project"]["optional-dependencies"]["test"])
