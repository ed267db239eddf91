"""The commands as a user types them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from qdsim.api import launch
from qdsim.cli import commands
from qdsim.errors import BadInput, Interrupted
from qdsim.store.run_directory import read_manifest
from tests.analysis.made import made_run
from tests.conftest import PROJECT
from tests.runs import run


def qdsim(*arguments, cwd=PROJECT, **environment):
    command = [sys.executable, "-m", "qdsim", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


REFUSED = [
    (["run", "jobs/none.toml"], "qdsim: JOB = 'jobs/none.toml': no such file; found: "),
    (
        ["run", "quikstart"],
        "qdsim: JOB = 'quikstart': no such file, and no job of that name; did you mean quickstart? ",
    ),
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


@pytest.mark.parametrize("arguments", [[], [PROJECT / "jobs"]], ids=["shipped", "of a folder"])
def test_jobs_lists_every_job_with_what_it_reproduces(tmp_path, arguments):
    """From any folder, each as it can be run: by its stem if it comes with qdsim, by its path if a folder was named."""
    done = qdsim("jobs", *arguments, cwd=tmp_path, COLUMNS="300")
    assert done.returncode == 0
    listed = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    files = sorted((PROJECT / "jobs").glob("*.toml"))
    assert list(listed) == [str(path) if arguments else path.stem for path in files]
    for line, path in zip(listed.values(), files, strict=True):
        assert tomllib.loads(path.read_text(encoding="utf-8"))["about"] in line


def test_a_job_is_run_by_its_stem_in_any_folder(tmp_path):
    """The manifest says what was typed."""
    done = qdsim("run", "quickstart", "--profile", "smoke", "--engine", "inline", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (manifest,) = tmp_path.glob("runs/quickstart-*/manifest.json")
    assert json.loads(manifest.read_text(encoding="utf-8"))["origin"]["job"] == "quickstart"


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


def test_what_a_manifest_says_is_shown_as_text(tmp_path):
    """A title with an escape sequence and markup: the terminal gets neither order."""
    run_dir = made_run(tmp_path, {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)]}}, note="\x1b[2J[bold]all good[/bold]")
    content = read_manifest(run_dir)
    content["methods"]["quickdrop"]["title"] = "\x1b]0;owned\x07[red]Quick"
    (run_dir / "manifest.json").write_text(json.dumps(content))
    shown = CliRunner().invoke(commands.app, ["show", str(run_dir)]).output
    assert "\x1b" not in shown
    assert "]0;owned[red]Quick" in shown
    assert "[bold]all good[/bold]" in shown


def test_a_copied_part_does_not_pass_for_a_second_seed(tmp_path):
    """As a file manager copies it: exit code 2 and the file, instead of n = 2 seeds."""
    run_dir = made_run(tmp_path, {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)]}})
    (part,) = (run_dir / "tables" / "stages").glob("*quickdrop*")
    shutil.copy(part, part.with_name(f"{part.stem} (copy).parquet"))
    refused = CliRunner().invoke(commands.app, ["show", str(run_dir)])
    assert isinstance(refused.exception, BadInput)
    assert "(copy).parquet" in str(refused.exception)


def test_a_closed_terminal_ends_a_run_as_a_stop_does():
    """SIGHUP: 129. Under nohup, which has it ignored, nothing happens."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
    try:
        with pytest.raises(Interrupted) as caught, launch.interruptible(at_once=True):
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught.value.exit_code == 129
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with launch.interruptible(at_once=True):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
