"""A run watched from its files alone."""

import io
import json

import pytest
from rich.console import Console

from qdsim.cli import watch
from qdsim.errors import BadInput
from qdsim.experiment import status
from qdsim.experiment.progress import Progress
from qdsim.store import lock
from qdsim.store.run_directory import read_manifest
from tests.runs import run, table


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What status said while a run went on, and the run."""
    out = tmp_path_factory.mktemp("watched")
    seen = []

    def look(event):
        if event.row is not None:
            (run_dir,) = out.glob("tiny-*")
            seen.append((event, status.read(run_dir)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "EVERY_S", 0.0)
        run_dir = run(out, emit=look)
    return seen, run_dir


def shown(run_dir):
    """What a person sees."""
    console = Console(width=100, record=True, file=io.StringIO())
    watch.print_status(console, run_dir)
    return console.export_text()


def test_while_a_run_goes_on_its_files_say_where(watched):
    """Each look, taken by another reader, is at most one event behind; accuracy, tasks and share come along."""
    seen, _ = watched
    event, found = seen[4]
    assert found.state == "running"
    assert (found.progress["phase"], found.progress["tasks"]) == (event.phase, 2)
    assert 0 < found.progress["share_done"] < 1
    assert found.progress["clients"] == 10
    assert found.peak_memory_bytes > 1e8


def test_a_finished_run(watched):
    """Done, with its last phase and both requests served."""
    _, run_dir = watched
    text = shown(run_dir)
    assert f"{run_dir.name}  done" in text
    assert "requests served  2 of 2" in text
    last = table(run_dir, "rounds").query("method == 'retrain' and phase == 'relearn'").iloc[-1]
    assert f"relearn 1/1   test {last['test_accuracy']:.1%}, F-Set {last['forget_accuracy']:.1%}" in text
    assert "GB in the largest client process" in text
    assert " left" not in text


def test_a_run_whose_process_is_gone_says_how_to_go_on(watched, tmp_path):
    """The manifest says running; nobody holds its lock. With a live owner it is running."""
    _, run_dir = watched
    manifest = read_manifest(run_dir)
    copy = tmp_path / run_dir.name
    copy.mkdir()
    (copy / "manifest.json").write_text(json.dumps(manifest | {"state": "running"}))
    assert status.read(copy).state == "gone"
    assert f"no live process owns this run: qdsim resume {copy} continues" in shown(copy)
    with lock.held(copy):
        assert status.read(copy).state == "running"
        assert "starting: no round yet" in shown(copy)


def test_the_time_left_is_that_of_a_run_that_goes_on(watched, tmp_path):
    """80 to 125 s, while somebody holds the lock; a run that is gone, failed or interrupted has none."""
    copy = tmp_path / watched[1].name
    copy.mkdir()
    progress = {"phase": "train", "seed": 0, "left_low_s": 80.0, "left_high_s": 125.0}
    (copy / "progress.json").write_text(json.dumps(progress))
    manifest = read_manifest(watched[1])
    for state in ("failed", "interrupted", "running"):
        (copy / "manifest.json").write_text(json.dumps(manifest | {"state": state}))
        assert " left" not in shown(copy)
    with lock.held(copy):
        assert "1 min 20 s to 2 min 05 s left" in shown(copy)


def test_top_ends_with_the_run(watched, tmp_path):
    """It looks again every two seconds, until the run is over."""
    _, run_dir = watched
    copy = tmp_path / run_dir.name
    copy.mkdir()
    manifest = read_manifest(run_dir)
    (copy / "manifest.json").write_text(json.dumps(manifest | {"state": "running"}))
    looks = []

    def pass_by(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            (copy / "manifest.json").write_text(json.dumps(manifest))

    console = Console(width=100, record=True, file=io.StringIO())
    with lock.held(copy):
        watch.top(console, copy, sleep=pass_by)
    assert looks == [2.0, 2.0, 2.0]
    assert "done" in console.export_text()


def test_what_is_no_run(tmp_path):
    """One line."""
    with pytest.raises(BadInput, match="not a run directory"):
        shown(tmp_path)


def test_what_others_wrote_into_the_files_is_shown_as_text_or_not_at_all(watched, tmp_path):
    """Markup, escape sequences, and values of another kind: no error, no order to the terminal."""
    _, run_dir = watched
    copy = tmp_path / run_dir.name
    copy.mkdir()
    manifest = read_manifest(run_dir)
    odd = {"state": "failed", "error": "\x1b[2J[/red]", "started_at": "[bold]now"}
    (copy / "manifest.json").write_text(json.dumps(manifest | odd))
    progress = {
        "phase": "train",
        "share_done": "much",
        "notes": None,
        "left_s": float("nan"),
        "cell": 3,
        "tasks": "[/x]",
    }
    (copy / "progress.json").write_text(json.dumps(progress | {"test_accuracy": 0.5}))
    text = shown(copy)
    assert "[bold]now" in text
    assert "\x1b" not in text
    assert "test 50.0%" in text


def test_a_request_is_counted_once_however_often_it_is_passed_over(tmp_path):
    """A driver that was replaced says again what is done."""
    recorder = status.Recorder(tmp_path, tasks=2)
    for task in (0, 0, 1):
        recorder.take(Progress(task, "", 0, "quickdrop", "class:9", "recover", 0, 0, 0, 0, 0.5, finished=True))
    recorder.close()
    assert json.loads((tmp_path / "progress.json").read_text())["tasks_done"] == 2
