"""Jobs from Python: what goes in, what is refused, what is shown."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib

import numpy as np
import pytest

import qdsim
from qdsim.api import functions
from qdsim.errors import BadInput, CannotPlace, Interrupted
from qdsim.experiment import config
from qdsim.planning import estimate
from qdsim.store.verify import difference
from tests.cli.test_commands import REFUSED
from tests.conftest import PROJECT
from tests.runs import TINY
from tests.runs import run as run_tiny

SMALL = {"train.rounds": 1, "methods": ["quickdrop"]}
CHANGES = {"train.rounds": 2, "requests": [{"kind": "client", "target": 3}], "recover.stop": "rounds", "sequence": True}


def test_a_job_is_a_name_a_path_a_dict_or_a_job():
    """All four come to the same settings, with a profile and a changed key on top."""
    file = PROJECT / "jobs" / "quickstart.toml"
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    given = ["quickstart", str(file), file, content, config.load(file)]
    found = [functions.job_of(job, profile="smoke", set={"train.lr": 0.3}) for job in given]
    assert all(job == found[0] for job in found)
    assert (found[0].train.lr, found[0].train.rounds) == (0.3, 2), "of set, and of the profile"
    assert content == tomllib.loads(file.read_text(encoding="utf-8")), "what was given is not changed"


def test_set_means_what_it_means_on_the_command_line():
    """Values of Python, numpy's among them, and the texts that the manifest keeps of them come to the same job."""
    changes = CHANGES | {"train.steps": np.int64(7), "train.lr": np.float32(0.5), "seeds": (1, 2)}
    texts = functions.as_texts(changes)
    assert "requests=[{kind = 'client', target = 3}]" in texts
    assert "recover.stop=rounds" in texts
    assert functions.job_of(TINY, set=changes) == functions.job_of(TINY, set=texts)


@pytest.mark.parametrize(
    ("arguments", "text"), [case for case in REFUSED if case[0][0] == "run"], ids=lambda v: v[-1] if v[0] else ""
)
def test_a_mistake_raises_what_the_command_prints(arguments, text, tmp_path, monkeypatch):
    """The same line, and no run directory."""
    monkeypatch.setenv("QDSIM_DATA_ROOT", str(tmp_path))
    monkeypatch.chdir(PROJECT)
    with pytest.raises(BadInput) as raised:
        qdsim.run(arguments[1], set=arguments[3:], out=tmp_path / "out", engine="inline")
    assert f"qdsim: {raised.value}".startswith(text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "steam"}, "engine = 'steam': allowed: ray, inline"),
        ({"track": "paper"}, "--track = 'paper': no such tracker; allowed: tensorboard, wandb, mlflow, trackio"),
        ({"profile": "desk"}, "--profile = 'desk': allowed: laptop, smoke"),
        ({"chaos": ["kill client 1 at train:1"], "engine": "inline"}, "--chaos = 'inline': faults strike actors"),
    ],
)
def test_an_option_that_is_wrong(options, text, tmp_path):
    """One line, before anything starts."""
    with pytest.raises(BadInput) as raised:
        qdsim.run(TINY, out=tmp_path / "out", **options)
    assert str(raised.value).startswith(text)
    assert not (tmp_path / "out").exists()


def test_progress_is_shown_or_not(tmp_path, capsys):
    """Without a terminal: a line for each of the job's 1 + 1 + 2 + 1 rounds; with progress=False nothing at all.

    The second run lies in another folder and takes the training of the first up all the same.
    """
    shown = qdsim.run(TINY, set=SMALL, out=tmp_path / "a", engine="inline")
    said = capsys.readouterr().out
    assert f"results in {shown.path}" in said
    assert sum("/1: test " in line or "/2: test " in line for line in said.splitlines()) == 5
    again = qdsim.run(TINY, set=SMALL, out=tmp_path / "b", engine="inline", trained_in=tmp_path / "a", progress=False)
    assert capsys.readouterr() == ("", "")
    assert difference(shown.path, again.path) is None
    assert again.rounds.loc[again.rounds["phase"] == "train", "reused"].all()
    assert not (tmp_path / "b" / ".trained").exists()


def test_the_log_has_what_the_screen_had(tmp_path, capsys):
    """Every line of the screen, without its clock: the job, where results go, notes of trackers, rounds, the end.

    A run that was done before says where its results are as well.
    """
    done = qdsim.run(TINY, set=SMALL, out=tmp_path, engine="inline")
    said = [re.sub(r"^\[.{7}\] ", "", line) for line in capsys.readouterr().out.splitlines()]
    log = (done.path / "log.txt").read_text(encoding="utf-8")
    assert f"results in {done.path}" in said
    assert any(line.startswith("tiny: digits, 10 clients") for line in said)
    rounds = [line.partition(" s, ")[0] for line in said if "/1 done" not in line]  # the time left is not kept
    assert [line for line in rounds if line not in log] == []
    again = qdsim.run(TINY, set=SMALL, out=tmp_path, engine="inline", resume=True)
    assert again.path == done.path
    assert capsys.readouterr().out == f"results in {done.path}\n"


def test_an_interrupted_run_is_resumed(tmp_path):
    """What the first attempt did not do, the second does: all values are those of a run without an interruption."""

    def stop(event):
        if getattr(event, "row", None) is not None and event.phase == "recover":
            raise Interrupted(signal.SIGINT)

    small = {"train": {"rounds": 1}, "methods": ["quickdrop"]}
    with pytest.raises(Interrupted):
        run_tiny(tmp_path / "cut", emit=stop, **small)
    (cut,) = (tmp_path / "cut").glob("tiny-*")
    assert qdsim.load(cut).state == "interrupted"
    resumed = qdsim.resume(cut, engine="inline", progress=False)
    assert resumed.state == "done"
    assert difference(resumed.path, run_tiny(tmp_path / "whole", **small)) is None
    assert qdsim.resume(resumed, engine="inline", progress=False).path == resumed.path


def test_two_runs_are_compared_and_a_run_is_exported(tmp_path):
    """Equal to itself, by path, text or Run; with one round more the first difference is in a line."""
    small = {"methods": ["retrain"], "recover": {"rounds": 0}, "relearn": {"rounds": 0}}
    one, longer = (run_tiny(tmp_path / str(n), train={"rounds": n}, **small) for n in (1, 2))
    assert qdsim.verify(one, qdsim.load(one)) is None
    assert qdsim.verify(str(one), str(longer)) == difference(one, longer)
    assert "table rounds: " in qdsim.verify(str(one), str(longer))
    (said,) = qdsim.export(one, to="tensorboard", out=tmp_path / "there")
    assert str(tmp_path / "there" / one.name) in said
    assert [*(tmp_path / "there" / one.name).rglob("events.out.*")]
    with pytest.raises(BadInput, match="--to = 'paper': no such tracker"):
        qdsim.export(one, to=["paper"])
    with pytest.raises(BadInput, match=r"no manifest.json there"):
        qdsim.verify(str(one), str(tmp_path))


def test_ctrl_c_is_a_keyboard_interrupt(tmp_path):
    """As in any Python program; the manifest says interrupted, and the handler is the one that was there before."""
    before = signal.default_int_handler  # a command in the background may have been started without it
    inherited = signal.signal(signal.SIGINT, before)

    def press():
        while not [*tmp_path.glob("tiny-*/tables/rounds/seed-0-shared-train-00002.parquet")]:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        qdsim.run(TINY, set={"train.rounds": 2000}, out=tmp_path, engine="inline", progress=False)
    (path,) = tmp_path.glob("tiny-*")
    assert qdsim.load(path).state == "interrupted"
    assert signal.signal(signal.SIGINT, inherited) is before


def test_a_run_in_a_thread(tmp_path):
    """Signals belong to the main thread; elsewhere a run does without."""
    found = []
    call = dict(set=SMALL, out=tmp_path, engine="inline", progress=False)
    thread = threading.Thread(target=lambda: found.append(qdsim.run(TINY, **call)))
    thread.start()
    thread.join()
    assert [run.state for run in found] == ["done"]


def test_a_model_of_gpus_that_are_not_there_is_refused():
    """One line, with both ways out."""
    with pytest.raises(BadInput, match="--gpus = 0: --gpu a100 names what a machine has one or more of: leave one"):
        qdsim.plan("quickstart", gpu="a100", gpus=0)


def test_a_plan_reads_like_the_command(tmp_path):
    """Ten clients of the quickstart, five to an actor, on an imagined machine with one GPU."""
    plan = qdsim.plan("quickstart", gpus=1, gpu_memory="24GB")
    text = repr(plan)
    assert text.startswith("quickstart: 10 clients on a machine with 1 GPU,")
    assert "it fits: 2 actors" in text
    assert "assumed, not measured" in text
    assert plan._repr_html_().startswith("<pre>")
    phases = plan.phases.set_index(["method", "phase"])
    assert phases.loc[("shared", "train"), "rounds"] == 20
    assert phases["wall_s"].sum() + estimate.START_S == pytest.approx(plan.total_s)
    assert plan.range_s[0] < plan.total_s < plan.range_s[1]
    assert plan.storage_bytes == plan.report.storage_bytes > 0
    command = [sys.executable, "-m", "qdsim", "plan", "quickstart", "--gpus", "1", "--gpu-memory", "24GB"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "COLUMNS": "120"}
    said = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert [line.rstrip() for line in said.splitlines()] == text.splitlines()


def test_a_plan_that_does_not_fit_is_refused():
    """An actor of the job wants more than the GPU's memory has."""
    with pytest.raises(CannotPlace, match="the cluster cannot host this run"):
        qdsim.plan("quickstart", gpus=1, gpu_memory="1MB")
    with pytest.raises(BadInput, match="--gpus: --gpu-memory"):
        qdsim.plan("quickstart", cpus=4)


@pytest.mark.ray
def test_a_process_that_is_connected_to_ray_stays_so(tmp_path, cluster_address):
    """The run takes the cluster that is there and leaves it with all cores free; an address beside it is refused."""
    import ray

    ray.init(address=cluster_address, log_to_driver=False)
    try:
        changes = SMALL | {"cluster.clients_per_actor": 5}
        whole = ray.cluster_resources()
        found = qdsim.run(TINY, set=changes, out=tmp_path, progress=False)
        assert found.state == "done"
        assert set(found.clients["node_id"]) == {ray.get_runtime_context().get_node_id()}
        assert ray.is_initialized()
        deadline_s = time.monotonic() + 20
        while ray.available_resources().get("CPU") != whole["CPU"]:
            assert time.monotonic() < deadline_s, "the run's actors still hold cores"
            time.sleep(0.1)
        with pytest.raises(BadInput, match="connected to a cluster already"):
            qdsim.run(TINY, out=tmp_path, address=cluster_address, progress=False)
    finally:
        ray.shutdown()


def test_the_example_of_the_readme_runs(tmp_path):
    """As a script, in a shorter form than the reader runs it in: the first table has both methods."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    assert code.count('engine="inline"') == 1
    (tmp_path / "example.py").write_text(code.replace('engine="inline"', 'engine="inline", profile="smoke"'))
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "quickdrop" in done.stdout
    assert "retrain" in done.stdout
    (manifest,) = tmp_path.glob("runs/quickstart-*/manifest.json")
    assert json.loads(manifest.read_text())["origin"]["set"] == ["train.rounds=5"]


def test_what_a_run_keeps_of_how_its_job_differs_from_qdsims_own(tmp_path):
    """With a profile on both; an edited copy and a dict of the name as well; of one's own job nothing is known."""
    file = PROJECT / "jobs" / "quickstart.toml"
    edited = tmp_path / "mine.toml"
    edited.write_text(file.read_text(encoding="utf-8").replace("rounds = 20", "rounds = 7"), encoding="utf-8")
    content = tomllib.loads(edited.read_text(encoding="utf-8"))

    def changed(job, **options):
        return functions._changed(functions.job_of(job, **options), options.get("profile"))

    assert changed("quickstart") == changed(file) == changed("quickstart", profile="laptop") == []
    assert changed(edited) == changed(content) == ["train.rounds = 7"]
    assert changed("quickstart", profile="smoke", set={"sweep.train.lr": [0.1]}) == ['sweep = {"train.lr" = [0.1]}']
    assert changed("quickstart", set={"data.root": str(tmp_path)}) == []
    assert changed({"name": "other"}) is None
