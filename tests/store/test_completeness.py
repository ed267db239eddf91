"""A run is whole, or somebody says in one line what is missing, doubled or another's."""

import json
import shutil

import pytest

from analysis import load
from qdsim.errors import BadInput
from qdsim.store import completeness, run_directory, storage
from qdsim.store.run_directory import Manifest, TableWriter, read_manifest
from qdsim.store.verify import difference
from tests.analysis.made import made_run

METHODS = {
    "quickdrop": {"unlearn": [(1.0, 0.0, 0.4)], "recover": [(2.0, 0.0, 0.6)] * 2},
    "retrain": {"unlearn": [(9.0, 0.0, 0.7)]},
}


@pytest.fixture
def whole(tmp_path):
    """A finished run, with attacks on both models."""
    run = made_run(tmp_path, METHODS, membership=["loss_threshold"])
    writer = TableWriter(run)
    for method, phase in (("quickdrop", "recover"), ("retrain", "unlearn")):
        named = {"seed": 0, "cell": "", "method": method, "request": "class:9", "phase": phase, "round": 1}
        rows = [{**named, "attack": "loss_threshold", "subset": subset} for subset in ("forget", "retain")]
        writer.append("membership", f"seed-0-{method}-class:9-{phase}-loss_threshold", rows)
    return run


def verified(run):
    """Return what ``verify`` says of it."""
    try:
        return "two rows" if "run has two rows of" in difference(run, run) else "another difference"
    except BadInput as error:
        return str(error)


def refused(run):
    """Return in which words reading it is refused; the analysis leaves it out of comparisons."""
    with pytest.raises(BadInput) as caught:
        completeness.read(run)
    assert "\n" not in str(caught.value)
    assert verified(run) in (str(caught.value), "two rows")
    results = load(run)
    assert results.problems
    assert results.sound.runs.empty
    return str(caught.value)


def test_a_whole_run_is_taken(whole):
    """By everybody."""
    assert len(completeness.read(whole)["rounds"]) == 5
    assert difference(whole, whole) is None
    assert load(whole).problems == []


LOST = {
    "rounds/seed-0-quickdrop-class-9-recover-00002": "1 rounds that table stages counts are not in table rounds",
    "classes/seed-0-shared-train-00001": "1 rounds that table rounds has are not in table classes",
    "clients/seed-0-quickdrop-class-9-unlearn-00001": "2 clients that table rounds counts are not in table clients",
    "stages/seed-0-quickdrop-class-9-recover": "1 phases of table rounds have no row in table stages",
    "stages/seed-0-retrain-class-9-unlearn": "1 phases of table rounds have no row in table stages",
    "partitions/seed-0-shared": "table partitions has no rows of seed 0",
    "membership/seed-0-retrain-class-9-unlearn-loss_threshold": "table membership lacks loss_threshold on seed-0-retr",
}


@pytest.mark.parametrize("part", LOST)
def test_a_lost_part_of_a_finished_run_is_missed(whole, part):
    """Of each table one."""
    (whole / "tables" / f"{part}.parquet").unlink()
    assert LOST[part] in refused(whole)


@pytest.mark.parametrize("part", LOST)
def test_a_copy_of_a_part_is_no_second_seed(whole, part):
    """As a file manager names it."""
    path = whole / "tables" / f"{part}.parquet"
    shutil.copy(path, path.with_name(f"{path.stem} (copy).parquet"))
    said = refused(whole)
    assert f"{path.stem} (copy).parquet" in said
    assert f"holds rows that belong in {path.stem}.parquet" in said


@pytest.mark.parametrize("part", LOST)
def test_a_part_of_another_run_is_named(whole, tmp_path, part):
    """Under the same name, and with the same figures."""
    other = made_run(tmp_path, METHODS, run="2")
    (other / "tables" / part).parent.mkdir(exist_ok=True)
    for path in (whole / "tables").rglob("*.parquet"):
        if path.stem == part.partition("/")[2] and path.parent.name == part.partition("/")[0]:
            data = run_directory.pq.read_table(path)
            place = data.column_names.index("run_id")
            foreign = run_directory.pa.array([other.name] * len(data))
            run_directory.pq.write_table(data.set_column(place, data.schema.field(place), foreign), path)
    assert "holds rows of the run made-2, not of made-1" in refused(whole)


def test_a_run_that_goes_on_may_lack_what_it_has_not_written(whole):
    """A phase without a row in stages, and no attack yet; but a round that stages counts must be there."""
    content = read_manifest(whole)
    (whole / "manifest.json").write_text(json.dumps(content | {"state": "running"}))
    (whole / "tables" / "stages" / "seed-0-retrain-class-9-unlearn.parquet").unlink()
    for path in (whole / "tables" / "membership").glob("seed-*"):
        path.unlink()
    completeness.read(whole)
    completeness.check_to_resume(whole)
    partition = whole / "tables" / "partitions" / "seed-0-shared.parquet"
    kept = partition.read_bytes()
    partition.unlink()  # which is not written again: the federation serves requests already
    with pytest.raises(BadInput, match=r"not whole: table partitions has no rows of seed 0"):
        completeness.check_to_resume(whole)
    partition.write_bytes(kept)
    content["config"]["synthetic"] = {**(content["config"].get("synthetic") or {}), "gallery": 1}
    (whole / "manifest.json").write_text(json.dumps(content | {"state": "running"}))
    with pytest.raises(BadInput, match=r"not whole: table images has no rows of seed 0"):
        completeness.check_to_resume(whole)
    content["config"]["synthetic"]["gallery"] = 0
    (whole / "manifest.json").write_text(json.dumps(content | {"state": "running"}))
    (whole / "tables" / "clients" / "seed-0-shared-train-00001.parquet").unlink()
    with pytest.raises(BadInput, match=r"not whole: 2 clients that table rounds counts.*without --resume"):
        completeness.check_to_resume(whole)


def test_rows_that_are_there_twice_are_counted(whole):
    """A joined table beside one of its parts."""
    data = completeness.read(whole)["rounds"]
    run_directory._write_part(data, whole / "tables" / "rounds" / "all.parquet")
    assert "table rounds has 5 rows twice, first one of seed-0-" in refused(whole)


def test_long_tables_are_joined_once(whole, monkeypatch):
    """The same rows in one part beside the empty one; short tables stay as they are; a second time changes nothing."""
    before = completeness.read(whole)
    monkeypatch.setattr(run_directory, "JOINED_FROM", 5)
    for _ in range(2):
        run_directory.join_parts(whole)
        after = completeness.read(whole)
        for table in before:
            assert sorted(map(str, after[table].to_pylist())) == sorted(map(str, before[table].to_pylist()))
            assert after[table].schema.equals(before[table].schema)
    files = {table: len(list((whole / "tables" / table).iterdir())) for table in ("rounds", "clients", "stages")}
    assert files == {"rounds": 2, "clients": 2, "stages": 2}
    assert len(list((whole / "tables" / "membership").iterdir())) == 3
    assert not list((whole / "tables").glob(".*"))


def test_a_table_is_there_while_its_parts_are_joined(whole, monkeypatch):
    """Its folder and the joined one exchange their names in one step; without that step there is a gap between two."""
    monkeypatch.setattr(run_directory, "JOINED_FROM", 5)
    real, seen = storage.remove, []

    def look_and_remove(path):
        seen.append((path.name, path.exists(), (whole / "tables" / "rounds").exists()))
        real(path)

    monkeypatch.setattr(storage, "remove", look_and_remove)
    run_directory.join_parts(whole)
    of_rounds = [(name, there) for name, there, _ in seen if name.startswith(".rounds") and there]
    assert of_rounds == [(".rounds.joined.tmp", True)]  # the old parts, under the other's name; nothing was set aside
    assert all(table for *_, table in seen)
    assert len(completeness.read(whole)["rounds"]) == 5


def test_tables_are_joined_where_folders_cannot_be_exchanged(whole, monkeypatch):
    """One rename after the other, as on file systems of a network."""
    monkeypatch.setattr(run_directory, "JOINED_FROM", 5)
    monkeypatch.setattr(storage, "exchange", lambda one, other: False)
    run_directory.join_parts(whole)
    assert len(completeness.read(whole)["rounds"]) == 5
    assert not list((whole / "tables").glob(".*"))


def test_a_part_of_nobody_to_attack_is_whole(whole):
    """Where nobody is left to be taken for a member, an attack has a part without rows."""
    for subset in ("retrain", "quickdrop"):
        TableWriter(whole).append("membership", f"2-{subset}", [])
    assert len(completeness.read(whole)["membership"]) == 4
    assert difference(whole, whole) is None


def test_a_joining_that_was_cut_off_is_undone(whole, monkeypatch):
    """Between the two names of a folder: the old one takes its place again, then it is joined."""
    monkeypatch.setattr(run_directory, "JOINED_FROM", 5)
    folder = whole / "tables" / "rounds"
    (whole / "tables" / ".rounds.joined.tmp").mkdir()
    folder.rename(whole / "tables" / ".rounds.before.tmp")
    assert "no table rounds" in refused(whole)
    run_directory.join_parts(whole)
    assert len(completeness.read(whole)["rounds"]) == 5


def test_a_run_of_format_1_that_was_renamed_and_resumed_is_read(whole):
    """It gave its later rows the new name; a run of today's keeps the first."""
    content = read_manifest(whole) | {"run_id": "mine", "resumed_at": ["2026-11-18"]}
    (whole / "manifest.json").write_text(json.dumps(content))
    assert "not of mine" in refused(whole)
    del content["format"]
    (whole / "manifest.json").write_text(json.dumps(content))
    assert len(completeness.read(whole)["rounds"]) == 5
    manifest = Manifest.reopen(whole, lambda: None, {"run_id": "another"})
    manifest.finish("done")
    assert read_manifest(whole)["run_id"] == "mine"
    assert read_manifest(whole)["format"] == 1
