"""Runs of schema version 3, and of format 1, are read, compared, trained from and resumed as those of today are."""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import analysis
from analysis.pack import pack
from qdsim.cli.commands import app
from qdsim.errors import BadInput
from qdsim.experiment import config
from qdsim.store import summary, tables
from qdsim.store.run_directory import read_manifest, read_part
from qdsim.store.verify import difference
from tests.runs import run, table
from tests.store.older import copied_as_version_3, make_format_1, make_version_3, part_of_3

SETTINGS = {
    "methods": ["quickdrop", "retrain"],
    "partition": {"clients": 3},
    "train": {"rounds": 2, "steps": 1},
    "unlearn": {"steps": 1},
    "recover": {"rounds": 1, "steps": 1},
    "relearn": {"rounds": 0},
    "membership": ["loss_threshold", "entropy_svm"],
}
VERSION_3 = {"qdsim.schema_version": "3"}


@pytest.fixture(scope="module")
def today(tmp_path_factory):
    """A run of this version."""
    return run(tmp_path_factory.mktemp("today"), **SETTINGS)


@pytest.fixture(scope="module")
def older(today, tmp_path_factory):
    """The same run as version 3 wrote it."""
    return copied_as_version_3(today, tmp_path_factory.mktemp("older"))


def test_columns_get_their_new_names_and_keep_their_places():
    """``rule`` and ``rounds_most`` of stages; the rest, values and metadata stay."""
    data = pa.table({"seed": [0], "rule": ["rounds"], "rounds_run": [2], "rounds_most": [3]}, metadata=VERSION_3)
    found = tables.upgrade("stages", data)
    assert found.to_pydict() == {"seed": [0], "stop_reason": ["rounds"], "rounds_run": [2], "max_rounds": [3]}
    assert found.column_names == ["seed", "stop_reason", "rounds_run", "max_rounds"]
    assert tables.version(found) == 3


def test_attacks_get_their_new_names():
    """Of the column attack alone; a part without rows and one that lacks the column are fine."""
    data = pa.table({"attack": ["balanced", "literal", None], "subset": ["balanced"] * 3}, metadata=VERSION_3)
    found = tables.upgrade("membership", data)
    assert found["attack"].to_pylist() == ["loss_threshold", "entropy_svm", None]
    assert found["subset"].to_pylist() == ["balanced"] * 3
    assert tables.upgrade("membership", data.slice(0, 0)).schema == data.schema
    assert tables.upgrade("membership", data.drop_columns(["attack"])).column_names == ["subset"]


@pytest.mark.parametrize("metadata", [None, {"qdsim.schema_version": "4"}])
def test_todays_parts_and_those_of_others_are_left_alone(metadata):
    """Nothing is renamed where the version does not ask for it."""
    data = pa.table({"rule": ["rounds"]}, metadata=metadata)
    assert tables.upgrade("stages", data) is data


def test_a_version_that_is_no_number_is_a_damaged_part(tmp_path):
    """It raises what readers of parts expect."""
    pq.write_table(pa.table({"rule": ["rounds"]}, metadata={"qdsim.schema_version": "three"}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="invalid literal"):
        read_part(tmp_path / "a.parquet", "stages")


def test_the_older_run_has_the_old_words(older):
    """Or the tests below would show nothing."""
    assert {"rule", "rounds_most"} <= set(table(older, "stages").columns)
    assert set(table(older, "membership")["attack"]) == {"balanced", "literal"}
    assert read_manifest(older)["config"]["membership"] == ["balanced", "literal"]
    assert len(list((older / "tables" / "membership").glob("*-literal.parquet"))) == 2


def test_verify_takes_both_for_the_same_run(today, older):
    """Either way round; another stop_reason is a difference in today's word."""
    assert difference(older, today) is None
    assert difference(today, older) is None


def test_a_difference_from_an_older_run_is_still_one(tmp_path, today):
    """Of the renamed column, by its new name."""
    changed = copied_as_version_3(today, tmp_path)
    (part,) = (changed / "tables" / "stages").glob("*retrain*.parquet")
    data = pq.read_table(part)
    data = data.set_column(data.column_names.index("rounds_most"), "rounds_most", pa.array([77], pa.int64()))
    pq.write_table(data, part)
    assert "max_rounds is 2 against 77" in difference(today, changed)


def test_show_prints_the_same(today, older):
    """Stages and attacks, but for the folder."""
    pd.testing.assert_frame_equal(summary.stage_table(today), summary.stage_table(older))
    pd.testing.assert_frame_equal(summary.membership_table(today), summary.membership_table(older))
    new, old = (CliRunner().invoke(app, ["show", str(found)]).output for found in (today, older))
    assert "unlearned" in new
    assert "entropy_svm" in new
    assert old.replace(str(older), "") == new.replace(str(today), "")


def test_the_analysis_reads_the_same(today, older, tmp_path):
    """Every table equal and nothing to complain of; packed, it is a run of this version."""
    new, old = analysis.load(today), analysis.load(older)
    assert old.problems == []
    packed = analysis.load(pack(older, tmp_path))
    assert packed.problems == []
    for name in tables.COLUMNS:
        frames = [getattr(found, name) for found in (new, old, packed)]
        if name == "membership":  # within a request they come in the order of their files' names
            keys = ["method", "attack", "subset"]
            texts = [frame.astype({key: str for key in keys}) for frame in frames]
            frames = [frame.sort_values(keys, ignore_index=True) for frame in texts]
        pd.testing.assert_frame_equal(frames[0], frames[1])
        pd.testing.assert_frame_equal(frames[0], frames[2])
    assert set(pd.read_parquet(tmp_path / older.name / "tables" / "stages")["stop_reason"]) == {"rounds"}


def test_the_job_of_an_older_run_has_todays_words(older, tmp_path):
    """Also by itself; what is none of the old words is refused as ever."""
    manifest = read_manifest(older)
    assert config.of_manifest(manifest, older).membership == ("loss_threshold", "entropy_svm")
    manifest["config"]["membership"] = ["magic"]
    with pytest.raises(BadInput, match="'magic': no such attack"):
        config.of_manifest(manifest, older)


class Stopped(Exception):
    """The run was cut off here."""


def stopped_version_3(out):
    """Run until retraining begins, and return what version 3 would have left."""

    def stop(event):
        if event.method == "retrain":
            raise Stopped

    with pytest.raises(Stopped):
        run(out, **SETTINGS, emit=stop)
    (run_dir,) = out.glob("tiny-*")
    make_format_1(out)
    make_version_3(run_dir)
    for part in out.glob(".trained/*/tables/*.parquet"):
        part_of_3(part, part.stem)
    return run_dir


def test_a_run_begun_with_version_3_is_resumed(tmp_path, today):
    """QuickDrop was served and attacked, and is not served again; its parts are written in the words of the others."""
    run_dir = stopped_version_3(tmp_path)
    assert len(list((run_dir / "tables" / "membership").glob("*-balanced.parquet"))) == 1
    heard = []
    assert run(tmp_path, **SETTINGS, resume=True, emit=heard.append) == run_dir
    assert not [e for e in heard if e.method == "quickdrop" and e.row is not None and not e.finished]
    assert difference(today, run_dir) is None
    for name in ("stages", "membership"):
        assert set(table(run_dir, name).columns) == set(tables.names(name))
        assert not table(run_dir, name)["round"].isna().any()
    assert table(run_dir, "stages")["stop_reason"].notna().all()
    assert set(table(run_dir, "membership")["attack"]) == {"loss_threshold", "entropy_svm"}
    assert not list((run_dir / "tables" / "membership").glob("*-balanced.parquet"))
    assert read_manifest(run_dir)["config"]["membership"] == ["loss_threshold", "entropy_svm"]


def test_other_attacks_are_still_other_settings(tmp_path):
    """The old word for the new one, and nothing more."""
    stopped_version_3(tmp_path)
    with pytest.raises(BadInput, match=r"other settings: membership \(then \['loss_threshold', 'entropy_svm'\]"):
        run(tmp_path, **(SETTINGS | {"membership": ["loss_threshold"]}), resume=True)


def test_a_state_that_version_3_trained_is_found_and_copied_in_todays_words(tmp_path, today):
    """Another run under the same folder: its training is a copy, and equal to one that was run."""
    stopped_version_3(tmp_path)
    again = run(tmp_path, **SETTINGS)
    assert table(again, "stages").query("phase == 'train'")["reused"].all()
    assert difference(today, again) is None
    assert json.loads((again / "manifest.json").read_text())["state"] == "done"


@pytest.mark.parametrize("method", ["shared", "quickdrop", "retrain"])
def test_a_run_begun_with_format_1_is_resumed(tmp_path, today, method):
    """Schema version 4, stopped in training, unlearning or retraining: its files do not say whose they are."""

    def stop(event):
        if event.method == method and event.row is not None:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path, **SETTINGS, emit=stop)
    make_format_1(tmp_path)
    resumed = run(tmp_path, **SETTINGS, resume=True)
    assert difference(today, resumed) is None
    assert read_manifest(resumed)["format"] == 1


def test_a_file_without_an_owner_in_a_run_of_today_is_refused(tmp_path):
    """A commit as format 1 wrote it, in a run that was begun since."""

    def stop(event):
        if event.method == "retrain" and event.row is not None:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path, **SETTINGS, emit=stop)
    (run_dir,) = tmp_path.glob("tiny-*")
    manifest = (run_dir / "manifest.json").read_bytes()
    make_format_1(run_dir)
    (run_dir / "manifest.json").write_bytes(manifest)
    with pytest.raises(BadInput, match=r"commit\.npz.*says nothing of whose it is"):
        run(tmp_path, **SETTINGS, resume=True)
