"""A run as Python sees it."""

import shutil
import sys
import types

import pandas as pd
import pyarrow.parquet as pq
import pytest

import qdsim
from qdsim.errors import BadInput
from qdsim.store import run_directory, tables
from tests.runs import run


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two seeds, of which the second comes first, and a method's name that sorts before the job's first."""
    path = run(
        tmp_path_factory.mktemp("out"), seeds=[3, 1], methods=["retrain", "quickdrop"], membership=["loss_threshold"]
    )
    return qdsim.load(path)


def test_every_table_is_a_dataframe(done):
    """All columns, and as many rows as the parts have."""
    for name, columns in tables.COLUMNS.items():
        frame = getattr(done, name)
        assert isinstance(frame, pd.DataFrame)
        assert list(frame.columns) == [column.name for column in columns]
        parts = [*(done.path / "tables" / name).glob("*.parquet")]
        assert len(frame) == sum(pq.read_metadata(part).num_rows for part in parts)
    assert len(done.partitions) == 2 * 10 * 10
    assert done.images.empty


def test_rows_come_in_the_order_of_the_job(done):
    """Seeds, methods and phases as they ran: 3 rounds of training, then retraining, then QuickDrop's 1 + 2 + 1."""
    one_seed = [("shared", "train")] * 3 + [("retrain", "unlearn")] * 3 + [("retrain", "relearn")]
    one_seed += [("quickdrop", "unlearn"), *[("quickdrop", "recover")] * 2, ("quickdrop", "relearn")]
    rounds = done.rounds
    assert [*zip(rounds["method"], rounds["phase"], strict=True)] == one_seed * 2
    assert rounds["seed"].tolist() == [3] * 11 + [1] * 11
    assert rounds["round"].tolist() == [1, 2, 3, 1, 2, 3, 1, 1, 1, 2, 1] * 2
    classes = done.classes.head(20)
    assert classes["class"].tolist() == [*range(10), *range(10)]
    assert classes["round"].tolist() == [1] * 10 + [2] * 10


def test_what_is_changed_in_a_frame_stays_there(done):
    """The next access has the run's own values again."""
    before = done.rounds
    changed = done.rounds
    changed["test_accuracy"] = -1.0
    changed.loc[0, "round"] = 99
    pd.testing.assert_frame_equal(done.rounds, before)


def test_the_result_and_what_the_run_is(done):
    """The summary is the command's table; the manifest, the state and the name are those of the directory."""
    summary = done.summary()
    assert summary["method"].unique().tolist() == ["shared", "retrain", "quickdrop"]
    assert (summary["n"] == 2).all()
    assert done.manifest["config"]["seeds"] == [3, 1]
    assert (done.state, done.run_id) == ("done", done.path.name)


def test_how_a_run_looks(done, tmp_path):
    """In a line, and as HTML with the table of the command; names of folders are text there, not markup."""
    assert repr(done) == f"Run('{done.path}': done, digits, 10 clients, 2 seeds, retrain, quickdrop)"
    html = done._repr_html_()
    assert "<td>QuickDrop</td>" in html
    assert "<td>recovered</td>" in html
    assert "forget class:9  (n = 2 seeds)" in html
    odd = tmp_path / "<b>odd"
    shutil.copytree(done.path, odd)
    assert "<b>odd" not in qdsim.load(odd)._repr_html_()


def test_a_run_that_goes_on_is_read_anew(done, tmp_path):
    """Of a finished run a table is read once; of one that is not, at each access."""
    copy = tmp_path / done.path.name
    shutil.copytree(done.path, copy)
    manifest = run_directory.read_manifest(copy) | {"state": "running"}
    (copy / "manifest.json").write_text(run_directory.manifest_text(manifest))
    going_on = qdsim.load(copy)
    assert len(going_on.rounds) == 22
    (copy / "tables" / "rounds" / "seed-1-shared-train-00003.parquet").unlink()
    assert len(going_on.rounds) == 21
    assert "the run is not finished: running" in going_on._repr_html_()


def test_the_report_of_a_run(done, tmp_path):
    """The page of ``qdsim report``, where one wants it; of a run or of several."""
    page = done.report(tmp_path / "report")
    assert page == tmp_path / "report" / "index.html"
    assert done.run_id in page.read_text(encoding="utf-8")
    assert qdsim.report([done], out=tmp_path / "same").read_text(encoding="utf-8").count(done.run_id) == 1


def test_a_module_of_the_users_own_called_analysis(done, tmp_path, monkeypatch):
    """It is loaded already, so the report's cannot be: one line says what to do."""
    theirs = types.ModuleType("analysis")
    theirs.__file__ = str(tmp_path / "analysis.py")
    monkeypatch.setitem(sys.modules, "analysis", theirs)
    with pytest.raises(BadInput, match="run qdsim report in a terminal"):
        qdsim.report(done, out=tmp_path / "out")


def test_what_is_no_run_or_no_table(done, tmp_path):
    """One line each."""
    with pytest.raises(BadInput, match=r"no manifest\.json there: not a run directory"):
        qdsim.load(tmp_path)
    with pytest.raises(BadInput, match="table = 'round': allowed: rounds, stages"):
        done.table("round")
