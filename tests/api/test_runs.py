"""Several runs: a list of them, their results beside each other."""

import io
import json

import pytest
from rich.console import Console

from qdsim.api import display, runs
from qdsim.api.run import Run
from qdsim.errors import BadInput
from qdsim.store import run_directory
from tests.analysis.made import made_run

STAGES = {"unlearn": [(1.0, 0.0, 0.5)], "recover": [(1.0, 0.125, 0.75)], "relearn": [(1.0, 0.9, 0.9)]}
METHODS = {"quickdrop": STAGES, "retrain": {"unlearn": [(9.0, 0.0, 0.875)], "relearn": [(9.0, 0.9, 0.9)]}}
OLD, MIDDLE, NEW = (f"20261118-1{hour}0000-0a0b" for hour in (0, 1, 2))


@pytest.fixture
def folder(tmp_path):
    """Three runs, of which the one in the middle is damaged, and what is no run."""
    made_run(tmp_path, METHODS, run=OLD)
    made_run(tmp_path, METHODS, job="another", run=NEW, state="failed", train={"rounds": 7})
    damaged = tmp_path / f"zebra-{MIDDLE}"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_runs_are_listed_newest_first_and_a_damaged_one_says_so(folder):
    """Whatever their jobs are named: by the time in their names. Results are those after recovery."""
    lines = runs.listed(folder)
    assert [line.path.name for line in lines] == [f"another-{NEW}", f"zebra-{MIDDLE}", f"made-{OLD}"]
    assert [line.state for line in lines] == ["failed", "damaged", "done"]
    assert [line.job for line in lines] == ["another", "", "made"]
    assert lines[2].result == "class:9: QuickDrop 12.5%/75.0%, Retrain-Or 0.0%/87.5%"
    assert "its manifest.json cannot be read" in lines[1].result


def test_a_run_whose_tables_are_damaged_is_a_row_as_well(folder):
    """A part that is no Parquet file."""
    (part,) = (folder / f"made-{OLD}" / "tables" / "stages").glob("*quickdrop-class-9-recover*")
    part.write_bytes(b"not a table")
    line = runs.listed(folder)[2]
    assert (line.state, line.job) == ("damaged", "made")
    assert part.name in line.result or "cannot be read" in line.result


def test_a_run_without_a_result_has_a_row(tmp_path):
    """Nothing served yet: what its manifest says of a failure."""
    made_run(tmp_path, {}, run=OLD, state="interrupted")
    (line,) = runs.listed(tmp_path)
    assert (line.state, line.result) == ("interrupted", "")


def test_latest_is_the_newest_run(folder, monkeypatch):
    """``latest`` in ``runs``, ``DIR/latest`` in DIR; a directory that has that name comes first."""
    assert run_directory.find_run(f"{folder}/latest") == folder / f"another-{NEW}"
    assert Run(f"{folder}/latest").path == folder / f"another-{NEW}"
    monkeypatch.chdir(folder)
    with pytest.raises(BadInput, match="RUN = 'latest': there is no run in runs"):
        run_directory.find_run("latest")
    made_run(folder / "runs", METHODS, run=OLD)
    assert run_directory.find_run("latest").name == f"made-{OLD}"
    made_run(folder, METHODS, job="x", run=NEW).rename(folder / "latest")
    assert run_directory.find_run("latest").name == "latest"


def test_a_renamed_run_counts_by_its_manifest(folder):
    """Made just now, so it is the newest, whatever its name."""
    made_run(folder, METHODS, job="plain", run="renamed")
    content = json.loads((folder / "plain-renamed" / "manifest.json").read_text())
    assert content["started_at"] > "2026"
    newest = run_directory.newest_first(folder)
    assert (folder / "plain-renamed") in newest
    times = [run_directory._started(run) for run in newest]
    assert times == sorted(times, reverse=True)


def test_runs_beside_each_other(folder):
    """What differs in their settings, and nothing else; stages of both."""
    found = runs.compared([folder / f"made-{OLD}", folder / f"another-{NEW}"])
    assert found.settings == {
        "name": {"A": "'made'", "B": "'another'"},
        "train.rounds": {"A": "2", "B": "7"},
    }
    recovered = found.stages.query("method == 'quickdrop' and phase == 'recover'")
    assert recovered["run"].tolist() == ["A", "B"]
    assert recovered["retain_accuracy"].tolist() == [0.75, 0.75]


def test_what_attacks_found_stands_beside_each_other_as_well(tmp_path):
    """F-Set rate 25 % in A and 50 % in B, retraining's 20 % in both: 5 and 30 points off; A and B in turn."""
    for run, rate in ((OLD, 0.25), (NEW, 0.5)):
        path = made_run(tmp_path, METHODS, run=run, membership=["loss_threshold"])
        writer = run_directory.TableWriter(path)
        for method, phase, own in (("quickdrop", "recover", rate), ("retrain", "unlearn", 0.2)):
            key = {"seed": 0, "cell": "", "method": method, "request": "class:9", "phase": phase, "round": 1}
            found = {"attack": "loss_threshold", "member_rate": own, "auc": 0.5, "tpr_at_1pct_fpr": 0.01}
            rows = [{**key, **found, "subset": subset} for subset in ("forget", "retain")]
            writer.append("membership", f"seed-0-{method}-class:9-{phase}-loss_threshold", rows)
    console = Console(file=io.StringIO(), width=150)
    display.print_comparison(console, runs.compared([tmp_path / f"made-{OLD}", tmp_path / f"made-{NEW}"]))
    said = console.file.getvalue().partition("membership inference, forget class:9")[2].splitlines()
    words = [line.split()[:5] for line in said if "loss_threshold" in line]
    assert words == [
        ["A", "loss_threshold", "QuickDrop", "25.0%", "+5.0"],
        ["B", "loss_threshold", "QuickDrop", "50.0%", "+30.0"],
        ["A", "loss_threshold", "Retrain-Or", "20.0%", "+0.0"],
        ["B", "loss_threshold", "Retrain-Or", "20.0%", "+0.0"],
    ]
