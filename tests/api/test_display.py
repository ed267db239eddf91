"""What a person sees while a run goes on, and what its log keeps."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from qdsim.api.display import Display
from qdsim.api.log import RunLog
from qdsim.experiment.progress import Notice, Progress, Step
from qdsim.experiment.status import Recorder
from qdsim.store.storage import Remote

SCORES = {"test_accuracy": 0.9, "forget_accuracy": 0.25, "retain_accuracy": 0.75, "wall_s": 1.0}


def event(phase: str, round_number: int, row: dict[str, float] | None = None, **changes) -> Progress:
    """An event of a phase of two rounds."""
    return Progress(0, "", 0, "quickdrop", "class:9", phase, round_number, 2, 1, 4, 0.5, row, **changes)


def shown(display: Display) -> str:
    """What the live screen has at this moment."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(display._render())
    return console.export_text()


def live() -> Display:
    """A display as in a terminal, of a run with one task."""
    display = Display(Console(file=io.StringIO(), force_terminal=True))
    display._tasks = ["seed 0 quickdrop class:9"]
    return display


def test_a_score_is_shown_beside_its_own_phase_and_round():
    """Round 1 of recovery scores 90 %; while round 2 runs that is said; in relearning's first round nothing is."""
    display = live()
    display.emit(event("recover", 1, SCORES))
    display.emit(event("recover", 2))
    assert "recover 2/2   round 1: test 90.0%, F-Set 25.0%, R-Set 75.0%" in shown(display)
    display.emit(event("recover", 2, SCORES, phase_ended=True))
    display.emit(event("relearn", 1))
    assert "relearn 1/2" in shown(display)
    assert "90.0%" not in shown(display).split("relearn 1/2")[-1]
    display.emit(event("relearn", 2, {**SCORES, "test_accuracy": 0.8}, phase_ended=True))
    display.emit(replace(event("relearn", 0, SCORES, finished=True), rounds=0))
    assert "relearn   round 2: test 80.0%" in shown(display)


def test_progress_json_has_the_scores_of_its_own_phase(tmp_path):
    """The last event of a task carries the scores of before relearning: they are not those of ``relearn 2/2``."""
    recorder = Recorder(tmp_path, tasks=1)
    recorder.take(event("recover", 2, SCORES))
    recorder.take(event("relearn", 1))
    assert "test_accuracy" not in recorder._now
    recorder.take(event("relearn", 2, {**SCORES, "test_accuracy": 0.8}))
    recorder.take(event("relearn", 2, SCORES, finished=True))
    now = recorder._now
    assert (now["phase"], now["round_number"], now["scored_round"], now["test_accuracy"]) == ("relearn", 2, 2, 0.8)


def test_the_start_says_what_is_going_on():
    """On the live screen with a count, in plain lines where a step begins and where all are started."""
    display = live()
    display._live = object()  # a screen is there, and nothing is printed
    display.emit(Step("starting client processes", 3, 10))
    assert "starting client processes, 3/10" in shown(display)
    lines = io.StringIO()
    plain = Display(Console(file=lines))
    for step in (Step("reading digits"), *(Step("starting client processes", i, 2) for i in (1, 2))):
        plain.emit(step)
    said = [line.partition("] ")[2] for line in lines.getvalue().splitlines()]
    assert said == ["reading digits", "starting client processes, 2/2"]


def test_what_another_cell_has_computed_is_said_to_be_reused(tmp_path):
    """In the plain lines and in the log."""
    lines, log = io.StringIO(), RunLog()
    plain = Display(Console(file=lines))
    plain._tasks = ["synthetic.scale=20 seed 0 retrain class:9"]
    log.begin(tmp_path, "begins")
    copied = replace(event("recover", 2, SCORES, finished=True), reused_from="synthetic.scale=10")
    plain.emit(copied)
    log.take(copied)
    said = "test 90.0%, F-Set 25.0%, R-Set 75.0%, reused from synthetic.scale=10\n"
    assert lines.getvalue().endswith(said)
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith(said)


@pytest.mark.parametrize("remote", [False, True], ids=["path", "URI"])
def test_the_log_has_a_line_for_whatever_was_said(tmp_path, remote):
    """What was said before there was a directory as well; a second attempt is appended; lines are whole."""
    run_dir = Remote("mock://memory/run") if remote else tmp_path
    run_dir.mkdir(parents=True, exist_ok=True)
    for attempt in ("first", "second"):
        log = RunLog()
        log.take(Step("reading digits"))
        log.begin(run_dir, f"{attempt} begins")
        log.take(Notice("no GPUs\nhere"))
        log.take(event("recover", 1, SCORES))
        log.take(event("recover", 2))
        log.end("done")
    lines = (run_dir / "log.txt").read_text(encoding="utf-8").splitlines()
    one = ["reading digits", "begins", "note: no GPUs here"]
    one += ["seed 0 quickdrop class:9 recover 1/2: test 90.0%, F-Set 25.0%, R-Set 75.0%, 1.0 s", "done"]
    said = [line[len("2026-11-18 12:00:00  ") :] for line in lines]
    assert [text.removeprefix("first ").removeprefix("second ") for text in said] == one * 2


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path):
    """A folder where the file should be."""
    (tmp_path / "log.txt").mkdir()
    log = RunLog()
    log.begin(tmp_path, "begins")
    log.end("done")
    assert list(tmp_path.iterdir()) == [tmp_path / "log.txt"]
