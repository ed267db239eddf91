"""The commands as a user types them."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import PROJECT
from tests.runs import run


def qdsim(*arguments, **environment):
    command = [sys.executable, "-m", "qdsim", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=280)


REFUSED = [
    (["run", "jobs/none.toml"], "qdsim: JOB = 'jobs/none.toml': no such file; found: "),
    (
        ["run", "jobs/quickstart.toml", "--set", "train.rouns=3"],
        "qdsim: train.rouns = 3: unknown key; did you mean rounds?",
    ),
    (
        ["run", "jobs/quickstart.toml", "--set", 'requests=[{kind="class", target=12}]'],
        "qdsim: requests[0].target = 12: classes of digits are numbered 0 to 9",
    ),
    (["run", "jobs/quickstart.toml", "--set", "data.dataset=svhn"], "qdsim: data.root = "),
    (["show", "jobs"], "qdsim: RUN = 'jobs': no manifest.json there: not a run directory"),
    (["jobs", "tests"], "qdsim: DIR = 'tests': no *.toml there"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[a[-1] for a, _ in REFUSED])
def test_a_users_mistake_gets_one_line_and_exit_code_2(arguments, text, tmp_path):
    """No traceback, nothing on standard output, no run directory."""
    extra = ["--out", tmp_path / "out"] if arguments[0] == "run" else []
    done = qdsim(*arguments, *extra, QDSIM_DATA_ROOT=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(text)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_debug_shows_where_an_error_came_from():
    """The traceback is there when it is asked for."""
    done = qdsim("run", "jobs/none.toml", "--debug")
    assert "Traceback" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize("arguments", [["frob"], ["run"], ["run", "jobs/quickstart.toml", "--engine", "steam"]])
def test_a_wrong_command_line_gets_one_line(arguments):
    """An unknown command, a missing argument, a value that is not allowed."""
    done = qdsim(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("qdsim: ")
    assert len(done.stderr.splitlines()) == 1


def test_no_arguments_show_the_help():
    """The three commands are named."""
    done = qdsim()
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("run", "show", "jobs"))


def test_jobs_lists_every_job_with_what_it_reproduces():
    """One line a job file."""
    done = qdsim("jobs")
    assert done.returncode == 0
    for path in (PROJECT / "jobs").glob("*.toml"):
        about = tomllib.loads(path.read_text(encoding="utf-8"))["about"]
        assert f"jobs/{path.name}" in done.stdout
        assert about.split()[0] in done.stdout


def test_show_prints_both_methods_of_two_seeds(tmp_path):
    """A mean with its deviation over n = 2 seeds, before, after each stage, and retrained, with a speed-up."""
    found = run(tmp_path, seeds=[0, 1])
    done = qdsim("show", found)
    assert done.returncode == 0
    assert "n = 2 seeds" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    stages = [(line[0], line[1]) for line in lines if len(line) > 6 and "%" in line[2]]
    assert stages == [
        ("before", "trained"),
        ("QuickDrop", "unlearned"),
        ("QuickDrop", "recovered"),
        ("QuickDrop", "relearned"),
        ("Retrain-Or", "unlearned"),
        ("Retrain-Or", "relearned"),
    ]
    assert re.search(r"recovered .*%.* ± .*x$", done.stdout.replace(" \n", "\n"), re.MULTILINE)


@pytest.mark.ray
@pytest.mark.slow
def test_the_quickstart_under_the_smoke_profile(tmp_path):
    """The real command with its own Ray: a line a round, the table, and the note that smoke means nothing."""
    done = qdsim("run", "jobs/quickstart.toml", "--profile", "smoke", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" shared train ") == 2
    assert "Retrain-Or" in done.stdout
    assert "profile smoke: these numbers show that the job runs, and mean nothing else" in done.stdout
    assert len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) == 1


@pytest.mark.ray
@pytest.mark.slow
def test_an_impossible_placement_ends_with_exit_code_3(tmp_path):
    """A whole GPU for each client on a machine without one: the nodes, and one line with what to set."""
    done = qdsim(
        "run",
        "jobs/quickstart.toml",
        "--set",
        "cluster.gpus_per_client=1.0",
        "--set",
        "cluster.local_gpus=0",
        "--out",
        tmp_path,
    )
    assert done.returncode == 3
    *nodes, said = done.stderr.splitlines()
    assert "actors that fit" in nodes[0]
    assert nodes[1].split()[2] == "0", "this machine's GPUs"
    assert said.startswith("qdsim: the cluster cannot host this run: asked for 2 actors of 1 GPU")
    assert said.endswith("set cluster.gpus_per_client to 0")
