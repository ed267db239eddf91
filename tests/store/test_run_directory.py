"""Tables stream as whole parts that pandas reads at any moment."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from qdsim.errors import BadInput
from qdsim.store import tables
from qdsim.store.run_directory import Manifest, TableWriter, new_run_directory, read_manifest

KEYS = {"seed": 0, "cell": "", "method": "shared", "request": "", "phase": "train"}


def test_a_table_can_be_read_before_its_first_row(tmp_path):
    """Zero rows with every column and its type; the version and the run are in the file."""
    run_dir = new_run_directory(tmp_path, "job")
    TableWriter(run_dir)
    for table in tables.COLUMNS:
        frame = pd.read_parquet(run_dir / "tables" / table)
        assert len(frame) == 0
        assert list(frame.columns) == tables.names(table)
    schema = pq.read_schema(run_dir / "tables" / "rounds" / "00-schema.parquet")
    assert schema.metadata[b"qdsim.schema_version"] == str(tables.SCHEMA_VERSION).encode()
    assert schema.metadata[b"qdsim.run_id"] == run_dir.name.encode()


def test_parts_add_up_and_a_repeated_part_replaces_itself(tmp_path):
    """Two rounds, the second written twice: two rows; null stays null beside numbers."""
    run_dir = new_run_directory(tmp_path, "job")
    writer = TableWriter(run_dir)
    writer.append("rounds", "seed-0-train-00001", [{**KEYS, "round": 1, "test_accuracy": 0.5}])
    for _ in range(2):
        writer.append("rounds", "seed-0-train-00002", [{**KEYS, "round": 2, "forget_accuracy": 0.25}])
    frame = pd.read_parquet(run_dir / "tables" / "rounds").sort_values("round")
    assert frame["round"].tolist() == [1, 2]
    assert frame["run_id"].tolist() == [run_dir.name] * 2
    assert frame["test_accuracy"].isna().tolist() == [False, True]
    assert str(frame["forget_accuracy"].dtype) == "float64"


def test_a_half_written_part_is_not_seen(tmp_path):
    """A leftover temporary file, as a crash would leave it, is passed over."""
    run_dir = new_run_directory(tmp_path, "job")
    writer = TableWriter(run_dir)
    writer.append("rounds", "a", [{**KEYS, "round": 1}])
    (run_dir / "tables" / "rounds" / ".b.parquet.123.tmp").write_bytes(b"PAR1half")
    assert len(pd.read_parquet(run_dir / "tables" / "rounds")) == 1


def test_unknown_columns_are_a_bug(tmp_path):
    """A row that the schema does not know is refused, not dropped."""
    writer = TableWriter(new_run_directory(tmp_path, "job"))
    with pytest.raises(ValueError, match=r"no columns \['colour'\]"):
        writer.append("rounds", "a", [{**KEYS, "colour": 1}])


def test_each_run_has_a_directory_of_its_own(tmp_path):
    """Two runs of a job never meet; a place that cannot be written to is refused."""
    assert new_run_directory(tmp_path, "job") != new_run_directory(tmp_path, "job")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written to"):
        new_run_directory(tmp_path / "file", "job")


def test_the_manifest_follows_the_run(tmp_path):
    """running, then done with an end; always whole JSON."""
    manifest = Manifest(tmp_path, {"run_id": "r"})
    assert read_manifest(tmp_path)["state"] == "running"
    manifest.finish("done", exit_code=0)
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert (found["state"], found["exit_code"], found["run_id"]) == ("done", 0, "r")
    assert found["finished_at"] >= found["started_at"]


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"[1]"])
def test_a_damaged_manifest_gets_one_line(tmp_path, content):
    """Missing, cut off, binary, not an object."""
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"manifest\.json") as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)
