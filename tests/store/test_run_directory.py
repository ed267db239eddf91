"""Tables stream as whole parts that pandas reads at any moment."""

import json

import pandas as pd
import pyarrow.parquet as pq
import pytest

from qdsim.errors import BadInput
from qdsim.store import tables
from qdsim.store.run_directory import (
    Manifest,
    TableWriter,
    check_folders,
    clear_temporary,
    new_run_directory,
    newest_run,
    read_manifest,
)

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


def test_a_changed_manifest_is_noticed(tmp_path):
    """One digit; without its checksum, as an older version wrote it, it is taken."""
    Manifest(tmp_path, {"run_id": "r", "config": {"seeds": [10]}})
    path = tmp_path / "manifest.json"
    assert path.read_text().count("10\n") == 1
    path.write_text(path.read_text().replace("10\n", "11\n"))
    with pytest.raises(BadInput, match="not as it was written"):
        read_manifest(tmp_path)
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert read_manifest(tmp_path)["config"]["seeds"] == [11]


def test_what_a_terminal_would_obey_is_left_out_of_a_manifest(tmp_path):
    """An escape sequence that renames the window, and one in a key; line breaks stay."""
    odd = {"run_id": "r", "error": "a\x1b]0;owned\x07b\n", "methods": {"sga\x9b2J": {"title": "\x1b[31mSGA"}}}
    (tmp_path / "manifest.json").write_text(json.dumps(odd))
    found = read_manifest(tmp_path)
    assert found["error"] == "a]0;ownedb\n"
    assert found["methods"] == {"sga2J": {"title": "[31mSGA"}}


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "", ".", "..", ".hidden", 5])
def test_a_run_id_is_a_name(tmp_path, name):
    """It becomes part of paths."""
    (tmp_path / "manifest.json").write_text(json.dumps({"run_id": name}))
    with pytest.raises(BadInput, match="is no name of a run"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 6_000 + "}"])
def test_a_manifest_that_no_parser_takes_gets_one_line(tmp_path, text):
    """Brackets without end, a number of 6,000 digits."""
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match="cannot be read"):
        read_manifest(tmp_path)


def test_the_newest_run_is_found_beside_a_broken_one_of_another_job(tmp_path):
    """``job-b`` begins with ``job-``, too; a broken run of the job itself is not passed over."""
    run = tmp_path / "job-20261118-080000-abcd"
    for folder in (run, tmp_path / "job-b-20261118-090000-abcd"):
        folder.mkdir()
    Manifest(run, {"run_id": run.name, "config": {"name": "job"}})
    (tmp_path / "job-b-20261118-090000-abcd" / "manifest.json").write_text("{")
    assert newest_run(tmp_path, "job") == run
    (tmp_path / "job-20261118-090000-abcd").mkdir()
    (tmp_path / "job-20261118-090000-abcd" / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match=r"job-20261118-090000-abcd.*manifest\.json cannot be read"):
        newest_run(tmp_path, "job")
    newest = tmp_path / "job-20261118-100000-abcd"
    newest.mkdir()
    Manifest(newest, {"run_id": newest.name, "config": {"name": "job"}})
    assert newest_run(tmp_path, "job") == newest  # whatever became of the ones before it


def test_a_run_with_a_linked_folder_is_not_written_to(tmp_path):
    """What is deleted there would be somebody else's."""
    run = new_run_directory(tmp_path, "job")
    check_folders(run)
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match=r"checkpoint.*is a link to another folder"):
        check_folders(run)


def test_what_was_half_written_is_cleared(tmp_path):
    """Anywhere in the run, and nothing else."""
    run = new_run_directory(tmp_path, "job")
    (run / "checkpoint").mkdir()
    for name in (".manifest.json.1a.tmp", "checkpoint/.commit.npz.1a.tmp", "checkpoint/commit.npz"):
        (run / name).write_text("half")
    clear_temporary(run)
    assert [path.name for path in sorted(run.rglob("*")) if path.is_file()] == ["commit.npz"]
