"""Reading runs: what is read, and that bad input costs one line and never the rest."""

import json
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import load
from qdsim.store.run_directory import read_manifest
from qdsim.store.tables import COLUMNS, names
from tests.analysis.made import made_run

METHODS = {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)], "recover": [(2.0, 0.0, 0.6)]}}


def test_a_folder_stands_for_its_runs_and_a_run_for_itself(tmp_path):
    """Both give the same tables: a row of stages for training, unlearning and recovery."""
    run = made_run(tmp_path, METHODS)
    for given in (tmp_path, run, [run], str(run)):
        results = load(given)
        assert list(results.runs["run_id"]) == ["made-1"]
        assert sorted(results.stages["phase"]) == ["recover", "train", "unlearn"]
        assert results.problems == []


def test_every_table_is_there_with_its_columns(tmp_path):
    """Also those that have no rows, such as membership here."""
    results = load(made_run(tmp_path, METHODS))
    for table in COLUMNS:
        frame = getattr(results, table)
        assert set(frame.columns) >= {*names(table), "job", "dataset", "setting", "partition", "asked"}
    assert len(results.membership) == 0
    assert len(results.clients) == 6  # 3 phases of one round, 2 clients
    with pytest.raises(AttributeError):
        _ = results.no_such_table


def test_rows_say_where_they_belong(tmp_path):
    """The job, the data set and the partition of the row's own seed."""
    results = load(made_run(tmp_path, METHODS, seeds=(0, 1)))
    assert set(results.rounds["job"]) == {"made"}
    assert set(results.rounds["dataset"]) == {"cifar10"}
    by_seed = results.rounds.groupby("seed")["partition"].unique()
    assert [list(found) for found in by_seed] == [["p0"], ["p1"]]


def test_a_drawn_target_goes_by_the_name_that_was_asked_for(tmp_path):
    """class:9, drawn for this seed, is ``class:random`` in ``asked`` and itself in ``request``."""
    results = load(made_run(tmp_path, METHODS, requests=[{"kind": "class", "target": "random"}]))
    served = results.stages[results.stages["method"] == "quickdrop"]
    assert set(served["request"]) == {"class:9"}
    assert set(served["asked"]) == {"class:random"}


def test_settings_differ_where_numbers_may_and_nowhere_else(tmp_path):
    """Another batch is another setting; other seeds, methods, places and folders of data are not."""
    same = {"data": {"dataset": "cifar10", "root": "elsewhere"}, "cluster": {"clients_per_actor": 5, "threads": 1}}
    made_run(tmp_path, METHODS, run="1", cluster={"clients_per_actor": 1, "threads": 1})
    made_run(tmp_path, METHODS, run="2", seeds=(1,), **same)
    made_run(tmp_path, METHODS, run="3", train={"rounds": 2, "batch_size": 8}, cluster={"threads": 1})
    settings = load(tmp_path).runs.set_index("run_id")["setting"]
    assert settings["made-1"] == settings["made-2"]
    assert settings["made-1"] != settings["made-3"]


def test_an_empty_folder_and_none_at_all(tmp_path):
    """One line each."""
    results = load([tmp_path, tmp_path / "nowhere"])
    assert results.runs.empty
    assert [p.split(": ")[1] for p in results.problems] == [
        "no runs there (no manifest.json in it or in a folder of it)",
        "no such folder",
    ]


def test_a_run_without_tables(tmp_path):
    """A manifest alone."""
    run = made_run(tmp_path, METHODS)
    for path in sorted((run / "tables").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    results = load(tmp_path)
    assert results.runs.empty
    assert results.problems == [f"{run}: no tables there; left out"]


def test_tables_without_a_manifest(tmp_path):
    """It cannot be told what was run."""
    run = made_run(tmp_path, METHODS)
    (run / "manifest.json").unlink()
    assert "no manifest.json" in load(run).problems[0]


def test_a_manifest_that_is_no_json(tmp_path):
    """Half of a file."""
    run = made_run(tmp_path, METHODS)
    (run / "manifest.json").write_text('{"config": ')
    results = load(tmp_path)
    assert results.runs.empty
    assert "manifest.json cannot be read" in results.problems[0]


def test_a_half_written_part(tmp_path):
    """The part is named, the others are shown, and the run takes no part in comparisons."""
    run = made_run(tmp_path, METHODS)
    part = next((run / "tables" / "rounds").glob("*recover*"))
    part.write_bytes(part.read_bytes()[:200])
    results = load(tmp_path)
    assert len(results.rounds) == 2
    assert results.problems == [f"made-1: tables/rounds/{part.name}: not a whole Parquet file; left out"]
    assert results.sound.runs.empty


def test_a_part_that_is_being_written_is_not_looked_at(tmp_path):
    """Its name begins with a dot."""
    run = made_run(tmp_path, METHODS)
    (run / "tables" / "rounds" / ".x.parquet.1.tmp").write_bytes(b"half")
    (run / "tables" / "rounds" / ".x.parquet").write_bytes(b"half")
    assert load(tmp_path).problems == []


def test_a_foreign_parquet_file(tmp_path):
    """Somebody's own table among ours."""
    run = made_run(tmp_path, METHODS)
    pq.write_table(pa.table({"a": [1]}), run / "tables" / "rounds" / "zz.parquet")
    results = load(tmp_path)
    assert len(results.rounds) == 3
    assert "zz.parquet: a Parquet file that qdsim did not write" in results.problems[0]


def test_a_table_of_an_older_schema(tmp_path):
    """What it lacks is null and named; what it has may be compared."""
    run = made_run(tmp_path, METHODS)
    for part in (run / "tables" / "rounds").glob("*.parquet"):
        data = pq.read_table(part).drop_columns(["busy_s"])
        pq.write_table(data.replace_schema_metadata({"qdsim.schema_version": "1"}), part)
    results = load(tmp_path)
    assert results.rounds["busy_s"].isna().all()
    assert results.problems == ["made-1: its tables have schema version 1, not 4, and lack rounds.busy_s"]
    assert results.sound.runs["run_id"].tolist() == ["made-1"]


def test_a_copy_of_a_run_is_read_once(tmp_path):
    """Or each of its seeds would count twice."""
    made_run(tmp_path / "a", METHODS)
    made_run(tmp_path / "b", METHODS)
    results = load([tmp_path / "a", tmp_path / "b"])
    assert len(results.runs) == 1
    assert "left out" in results.problems[0]


def test_a_renamed_run_keeps_its_name_and_a_copy_of_it_is_left_out(tmp_path, monkeypatch):
    """The manifest knows; also from inside the folder, where its name is a dot."""
    run = made_run(tmp_path, METHODS)
    renamed = run.rename(tmp_path / "z-mine")
    assert set(load(tmp_path).stages["run_id"]) == {"made-1"}
    monkeypatch.chdir(renamed)
    assert set(load(".").stages["run_id"]) == {"made-1"}
    shutil.copytree(renamed, tmp_path / "zz-copy")
    results = load(tmp_path)
    assert len(results.stages) == 3
    assert "run made-1 was read already" in results.problems[0]


@pytest.mark.parametrize("content", [{"config": {"requests": None}}, {}, {"config": {"name": "x", "sweep": None}}])
def test_a_manifest_that_lacks_things(tmp_path, content):
    """Whatever it lacks, there is no traceback."""
    run = made_run(tmp_path, METHODS)
    (run / "manifest.json").write_text(json.dumps(content | {"cells": [{"requests": {"0": ["class:9"]}}]}))
    results = load(tmp_path)
    assert len(results.runs) == 1
    assert len(results.stages) == 3


@pytest.mark.parametrize("text", ["[1]", '{"config": 5}', '{"cells": 3}'])
def test_a_manifest_that_is_none_of_ours(tmp_path, text):
    """One line."""
    run = made_run(tmp_path, METHODS)
    (run / "manifest.json").write_text(text)
    results = load(tmp_path)
    assert results.runs.empty
    assert len(results.problems) == 1


def test_done_is_not_believed_when_rounds_are_lost(tmp_path):
    """A part that a copy left behind: the table stages counts it."""
    run = made_run(tmp_path, METHODS)
    next((run / "tables" / "rounds").glob("*recover*")).unlink()
    results = load(tmp_path)
    assert results.sound.runs.empty
    assert results.problems == [
        "made-1: 1 rounds that table stages counts are not in table rounds, first of seed-0-quickdrop-class:9-recover: "
        "left out of comparisons"
    ]


def test_done_is_not_believed_when_a_method_is_missing(tmp_path):
    """The manifest names it, the table does not have it."""
    made_run(tmp_path, METHODS)
    run = made_run(tmp_path, METHODS, run="2")
    content = read_manifest(run)
    content["config"]["methods"].append("sga")
    (run / "manifest.json").write_text(json.dumps(content))
    results = load(tmp_path)
    assert results.sound.runs["run_id"].tolist() == ["made-1"]
    assert "sga of seed 0" in results.problems[0]


def test_rows_are_in_the_order_of_the_phases(tmp_path):
    """Not of the files' names: recovery comes after unlearning."""
    results = load(made_run(tmp_path, METHODS))
    assert results.stages["phase"].tolist() == ["unlearn", "recover", "train"]  # quickdrop before shared


def test_of_two_runs_of_the_same_the_newest_stays(tmp_path):
    """In every table, or each of its rounds would be drawn twice."""
    made_run(tmp_path, METHODS, run="1")
    made_run(tmp_path, {"quickdrop": {"unlearn": [(9.0, 0.0, 0.1)]}}, run="2")
    kept = load(tmp_path).sound
    assert set(kept.rounds["run_id"]) == {"made-2"}
    assert len(kept.partitions) == 6


def test_pandas_reads_a_table_whose_next_part_is_being_written(tmp_path):
    """The promise to a user without ``analysis``."""
    run = made_run(tmp_path, METHODS, state="running")
    (run / "tables" / "rounds" / ".x.parquet.1.tmp").write_bytes(b"half")
    assert len(pd.read_parquet(run / "tables" / "rounds")) == 3
    assert read_manifest(run)["state"] == "running"
