"""CUDA MPS as the launchers start it, with a program in the place of NVIDIA's daemon."""

import os
import subprocess
import sys

import pytest

from tests.conftest import PROJECT

DAEMON = """#!/bin/bash
echo "$@ visible=${CUDA_VISIBLE_DEVICES-unset} log=$CUDA_MPS_LOG_DIRECTORY" >>"$NOTED"
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" && touch "$CUDA_MPS_PIPE_DIRECTORY/control"
"""


def launch(folder, wanted, *command, program=None):
    """Run the launcher's module with a program for the daemon, or without any."""
    (folder / "bin").mkdir(exist_ok=True)
    if program is not None:
        file = folder / "bin" / "nvidia-cuda-mps-control"
        file.write_text(program, encoding="utf-8")
        file.chmod(0o755)
    env = os.environ | {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(PROJECT),
        "NOTED": str(folder / "noted"),
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_VISIBLE_DEVICES": "1",
        "QDSIM_MPS": wanted,
    }
    words = [sys.executable, "-m", "qdsim.ray_engine.mps", *command]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("wanted", ["on", "auto"])
def test_it_starts_the_daemon_once_and_becomes_the_command(tmp_path, wanted):
    """The daemon sees all GPUs, or their numbers would be others than Ray's; a second start only asks it."""
    done = launch(tmp_path, wanted, "echo", "then", program=DAEMON)
    assert (done.returncode, done.stdout) == (0, "then\n")
    assert done.stderr == "qdsim: CUDA MPS started\n"
    assert launch(tmp_path, wanted).stderr == "qdsim: CUDA MPS runs on this node already\n"
    noted = (tmp_path / "noted").read_text(encoding="utf-8").splitlines()
    assert noted == ["-d visible=unset log=/tmp/nvidia-mps-log", " visible=unset log=/tmp/nvidia-mps-log"]


def test_off_starts_nothing(tmp_path):
    """And the command runs all the same."""
    done = launch(tmp_path, "off", "echo", "then", program=DAEMON)
    assert (done.returncode, done.stdout, done.stderr) == (0, "then\n", "")
    assert not (tmp_path / "noted").exists()


@pytest.mark.parametrize(("program", "why"), [(None, "is not installed"), ("#!/bin/bash\nexit 1\n", "-d ended with 1")])
def test_where_it_cannot_be_had_auto_goes_on_and_on_does_not(tmp_path, program, why):
    """Exit 3 before Ray starts, with the reason; or the reason alone."""
    done = launch(tmp_path, "on", "echo", "then", program=program)
    assert (done.returncode, done.stdout) == (3, "")
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = launch(tmp_path, "auto", "echo", "then", program=program)
    assert (done.returncode, done.stdout) == (0, "then\n")
    assert why in done.stderr


def test_another_word_is_refused(tmp_path):
    """With those that there are."""
    done = launch(tmp_path, "yes", "echo")
    assert (done.returncode, done.stderr) == (2, "qdsim: QDSIM_MPS = 'yes': allowed: off, on, auto\n")
