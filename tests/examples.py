"""The example package, installed as a user would install it, but into a folder of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROJECT

FORGETFUL = PROJECT / "examples" / "forgetful"
JOB = FORGETFUL / "job.toml"


def install(folder: Path) -> Path:
    """Install the package ``forgetful`` into a folder below this one and return that: to be put on PYTHONPATH."""
    source, target = folder / "source", folder / "installed"
    shutil.copytree(FORGETFUL, source)  # building leaves files beside the sources
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, env=dict(os.environ))
    return target
