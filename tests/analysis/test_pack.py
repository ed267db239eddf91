"""Packed runs: the same figures in few files, and nothing about the machine."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from analysis import load
from analysis.pack import pack
from qdsim.errors import BadInput
from qdsim.store.run_directory import read_manifest
from qdsim.store.tables import COLUMNS
from tests.analysis.made import made_run
from tests.conftest import PROJECT

METHODS = {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)], "recover": [(2.0, 0.0, 0.6), (2.0, 0.0, 0.7)]}}


def test_a_packed_run_reads_as_the_run_did(tmp_path):
    """Every table equal, one file each."""
    run = made_run(tmp_path / "runs", METHODS, seeds=(0, 1))
    packed = pack(run, tmp_path / "packed")
    before, after = load(run), load(tmp_path / "packed")
    assert after.problems == []
    for table in COLUMNS:
        pd.testing.assert_frame_equal(getattr(before, table), getattr(after, table))
        assert [path.name for path in (packed / "tables" / table).iterdir()] == ["all.parquet"]


def test_it_does_not_say_where_it_was_made(tmp_path):
    """Neither host nor folder of the data; the setting is the same."""
    run = made_run(
        tmp_path / "runs", METHODS, data={"dataset": "folder:/home/somebody/mine", "root": "/home/somebody/data"}
    )
    content = read_manifest(run)
    content |= {"hardware": {"host": "somehost", "cpus": 2}}
    content["origin"] = {"profile": None, "job": "/home/somebody/x.toml", "set": ["data.root=/home/somebody/data"]}
    (run / "manifest.json").write_text(json.dumps(content))
    packed = pack(run, tmp_path / "packed")
    text = (packed / "manifest.json").read_text()
    assert "somebody" not in text
    assert "somehost" not in text
    assert load(packed).runs["dataset"].tolist() == ["folder:mine"]


def test_a_run_with_a_damaged_part_is_refused_and_leaves_nothing(tmp_path):
    """So that the next try does not find half a run there."""
    run = made_run(tmp_path / "runs", METHODS)
    part = next((run / "tables" / "rounds").glob("*recover*"))
    part.write_bytes(b"half")
    with pytest.raises(BadInput, match="not a whole Parquet file"):
        pack(run, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_an_unfinished_run_and_a_second_time_are_refused(tmp_path):
    """One line each."""
    going = made_run(tmp_path / "runs", METHODS, state="running")
    with pytest.raises(BadInput, match="only a finished run is packed"):
        pack(going, tmp_path / "packed")
    done = made_run(tmp_path / "runs", METHODS, run="2")
    pack(done, tmp_path / "packed")
    with pytest.raises(BadInput, match="is there already"):
        pack(done, tmp_path / "packed")


@pytest.mark.parametrize("name", ["../outside", "{tmp}/outside"])
def test_a_run_is_packed_into_the_folder_that_was_asked_for(tmp_path, name):
    """Whatever its manifest calls it."""
    run = made_run(tmp_path / "runs", METHODS)
    content = read_manifest(run) | {"run_id": name.format(tmp=tmp_path)}
    (run / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match="is no name of a run"):
        pack(run, tmp_path / "packed" / "here")
    assert not list(tmp_path.rglob("*outside*"))


def test_a_run_that_is_not_whole_is_not_packed(tmp_path):
    """It would be shared as a finished one."""
    run = made_run(tmp_path / "runs", METHODS)
    next((run / "tables" / "classes").glob("*recover-00002*")).unlink()
    with pytest.raises(BadInput, match="not in table classes"):
        pack(run, tmp_path / "packed")


def test_a_terminal_that_knows_only_ascii(tmp_path):
    """A folder named α is written to, and said to be alpha: no error."""
    run = made_run(tmp_path, {"quickdrop": {"unlearn": [(1.0, 0.0, 0.4)]}})
    command = [sys.executable, "-m", "analysis", "pack", str(run), "--out", "α"]
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("alpha/")
    assert (tmp_path / "α").is_dir()
