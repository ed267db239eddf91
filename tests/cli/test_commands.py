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

from qdsim import __version__
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
    """No traceback, nothing on standard output but what is begun with, no run directory."""
    extra = ["--out", tmp_path / "out"] if arguments[0] == "run" else []
    done = qdsim(*arguments, *extra, QDSIM_DATA_ROOT=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(text)
    assert len(done.stderr.splitlines()) == 1
    assert all(re.match(r"\[ +\d+ s\] (starting Ray, )?reading", line) for line in done.stdout.splitlines())
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


@pytest.mark.parametrize("how", ["command", "module", "Python"])
def test_the_report_is_made_in_a_folder_that_has_its_own_analysis(tmp_path, how):
    """As ``qdsim report``, ``python -m qdsim report`` and ``qdsim.report``, of the latest run or of a folder.

    The page is what is named last.
    """
    made_run(tmp_path / "runs", {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)]}})
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "__init__.py").write_text("raise SystemExit('not this one')")
    program = {
        "command": ["-P", "-m", "qdsim", "report", "latest", "--out", "out"],
        "module": ["-m", "qdsim", "report", "runs/made-1", "--out", "out"],
        "Python": ["-c", "import qdsim; print(qdsim.report('runs/latest', out='out'))"],
    }[how]
    done = subprocess.run([sys.executable, *program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "out/index.html"
    assert "made-1" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_a_report_of_nothing_gets_one_line(tmp_path):
    """A folder without runs is a user's mistake."""
    done = qdsim("report", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"qdsim: RUNS = '{tmp_path}': nothing to report: {tmp_path}: no runs there")
    assert len(done.stderr.splitlines()) == 1


def test_show_prints_both_methods_of_two_seeds(tmp_path):
    """A mean with its deviation over n = 2 seeds, before, after each stage, and retrained, with a speed-up."""
    found = run(tmp_path, seeds=[0, 1])
    done = qdsim("show", found)
    assert done.returncode == 0
    assert "n = 2 seeds" in done.stdout
    assert done.stdout.splitlines()[-1] == f"report: qdsim report {found}"
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


def test_the_version():
    """As its package has it."""
    done = qdsim("--version")
    assert (done.returncode, done.stdout) == (0, f"qdsim {__version__}\n")


def test_bench_names_what_it_measures():
    """In its help; the names are those of the suite, which brings torch and is not imported for that."""
    from qdsim.bench import suite

    assert tuple(suite.ABOUT) == commands.BENCHMARKS
    shown = CliRunner().invoke(commands.app, ["bench", "--help"]).output
    assert all(name in shown for name in commands.BENCHMARKS)
    assert "simulation" in shown  # of Flower: in brackets rich takes it for an order


MADE = {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)], "recover": [(1.0, 0.0, 0.6)]}}


def test_runs_are_listed_and_latest_is_one_of_them(tmp_path, monkeypatch):
    """A line each; ``latest`` wherever a run is named, two of them beside each other."""
    for hour, changes in ((10, {}), (11, {"train": {"rounds": 5}})):
        made_run(tmp_path / "runs", MADE, run=f"20261118-{hour}0000-0a0b", **changes)
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(commands.app, ["runs"]).output.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["made-20261118-110000-0a0b", "done", "made"],
        ["made-20261118-100000-0a0b", "done", "made"],
    ]
    assert listed[1].rstrip().endswith("class:9: QuickDrop 0.0%/60.0%")
    for arguments in (["status", "latest"], ["show", "latest"], ["show", "runs/latest"]):
        done = CliRunner().invoke(commands.app, arguments)
        assert done.exit_code == 0
        assert "made-20261118-110000-0a0b" in done.output
    older = "runs/made-20261118-100000-0a0b"
    both = CliRunner().invoke(commands.app, ["show", "latest", older]).output
    assert "A  runs/made-20261118-110000-0a0b\nB  runs/made-20261118-100000-0a0b\n" in both
    assert re.search(r"train.rounds +5 +2", both)
    assert CliRunner().invoke(commands.app, ["verify", "latest", "runs/latest"]).output == "equal\n"
    empty = CliRunner().invoke(commands.app, ["runs", "nowhere"])
    assert str(empty.exception) == "DIR = 'nowhere': no run there"


def test_keys_are_listed_for_a_section():
    """Type, default and meaning in a line."""
    shown = CliRunner().invoke(commands.app, ["keys", "synthetic.scale"]).output.splitlines()
    assert CliRunner().invoke(commands.app, ["keys", "retrain"]).output == "retrain has no settings of its own\n"
    assert re.fullmatch(r"synthetic\.scale +whole number ≥ 1 +100 +s: .* = ceil\(.* / s\)\. *", shown[1])


def test_ctrl_c_while_a_run_is_not_resumed_yet(tmp_path):
    """The data are being read, and the run to resume is known: the command that resumes it is said all the same."""
    cut = made_run(tmp_path, MADE, state="interrupted", data={"dataset": "digits"})
    shutil.rmtree(cut / "tables")
    (cut / "tables").mkdir()
    command = [sys.executable, "-m", "qdsim", "resume", str(cut), "--engine", "inline"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert "reading digits" in first, said
    assert process.returncode == 130
    assert said == f"qdsim: interrupted; qdsim resume {cut} --engine inline continues\n"


def test_the_log_of_a_run_is_printed(tmp_path):
    """What was said, with its time; as text. Without a log: one line."""
    run_dir = made_run(tmp_path, MADE)
    refused = CliRunner().invoke(commands.app, ["logs", str(run_dir)])
    assert "it has no log.txt" in str(refused.exception)
    (run_dir / "log.txt").write_text("2026-11-18 10:00:00  reading \x1b[2Jdigits\n2026-11-18 10:00:09  half a li")
    for follow in ([], ["--follow"]):
        shown = CliRunner().invoke(commands.app, ["logs", str(run_dir), *follow]).output
        assert shown == "2026-11-18 10:00:00  reading [2Jdigits\n"


@pytest.mark.parametrize("arguments", [["jobs"], ["run", "--help"], ["show"], ["keys"]], ids=lambda a: a[0])
def test_a_terminal_that_knows_only_ascii(tmp_path, arguments):
    """What it has no letters for is written otherwise: no error, ± as +-."""
    if arguments == ["show"]:
        arguments = ["show", made_run(tmp_path, MADE, seeds=(0, 1))]
    done = qdsim(*arguments, PYTHONIOENCODING="ascii", COLUMNS="150")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert arguments[0] != "show" or "+- 0.00" in done.stdout


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_dead_address_is_told_at_once(tmp_path, command, address):
    """Nobody listens at port 1: exit code 3 and one line, before Ray waits there for minutes."""
    out = ["--out", tmp_path] if command == "run" else []
    done = qdsim(command, "quickstart", "--address", address, *out)
    assert done.returncode == 3
    assert done.stderr.startswith(
        f"qdsim: cannot reach the cluster at {address}: nobody answers at 127.0.0.1, port 1 ("
    )
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
