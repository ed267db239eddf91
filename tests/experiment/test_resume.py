"""Whatever the moment at which a run stops, it goes on from its last commit and ends as if nothing had been."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest

from qdsim.algorithms import distillation
from qdsim.errors import BadInput, StorageFailed, TakenOver
from qdsim.experiment.checkpoint import Checkpoint
from qdsim.store import lock
from qdsim.store.run_directory import TableWriter, read_manifest
from qdsim.store.verify import difference
from tests.runs import run, table

SETTINGS = {
    "methods": ["quickdrop", "retrain", "federaser"],
    "synthetic": {"finetune": 2, "gallery": 1},
    "train": {"participation": 0.5},
    "partition": {"clients": 4},
    "membership": ["loss_threshold"],
}
"""Every kind of phase: 3 rounds of training, 2 of fine-tuning, then each method's."""


class Stopped(Exception):
    """The run was cut off here."""


@pytest.fixture(scope="module", autouse=True)
def _short_finetuning():
    """Two inner steps stand for fifty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "FINETUNE_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing happened to."""
    return run(tmp_path_factory.mktemp("undisturbed"), **SETTINGS)


def cut_off(out, monkeypatch, owner, name, after, settings=SETTINGS):
    """Run until a method of the writers has been called so many times, then raise out of it."""
    calls = [0]
    real = getattr(owner, name)

    def counting(self, *arguments, **named):
        calls[0] += 1
        if calls[0] > after:
            raise Stopped
        return real(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counting)
        try:
            run(out, **settings, resume=True)
        except Stopped:
            return True
    return False


@pytest.mark.parametrize("after", [1, 4, 8, 15])
def test_cut_off_before_a_commit(tmp_path, monkeypatch, undisturbed, after):
    """After that many commits: in training, fine-tuning, and each phase of each method; the round in hand is redone."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", after)
    resumed = run(tmp_path, **SETTINGS, resume=True)
    assert difference(undisturbed, resumed) is None
    assert not (resumed / "checkpoint").exists()


@pytest.mark.parametrize(
    ("kind", "commits"), [("momentum", (2, 4)), ("yogi", (2, 4)), ("adam", random.Random(21).sample(range(1, 7), 2))]
)
def test_what_the_servers_rule_remembers_is_committed(tmp_path, monkeypatch, kind, commits):
    """Cut off after round 2 of training and after the first round of retraining: equal to the run that was not.

    It could not be if the state began anew: with the mean the models differ. FedAdam stops at two commits that are
    drawn among the first six of seven: three rounds each of training and retraining, one of relearning.
    """
    settings = {"methods": ["retrain"], "server": {"kind": kind, "lr": 0.1}}
    whole = run(tmp_path / "whole", **settings)
    for after in commits:
        assert cut_off(tmp_path / str(after), monkeypatch, Checkpoint, "save", after, settings)
        assert difference(whole, run(tmp_path / str(after), **settings, resume=True)) is None
    plain = run(tmp_path / "plain", methods=["retrain"])
    assert set(table(plain, "rounds")["params_sha256"]).isdisjoint(table(whole, "rounds")["params_sha256"])


@pytest.mark.parametrize("after", [9, 33])
def test_cut_off_between_the_rows_of_a_round(tmp_path, monkeypatch, undisturbed, after):
    """Some tables have the round's rows and others have not: no row twice, none missing."""
    assert cut_off(tmp_path, monkeypatch, TableWriter, "append", after)
    assert difference(undisturbed, run(tmp_path, **SETTINGS, resume=True)) is None


def test_cut_off_again_and_again(tmp_path, monkeypatch, undisturbed):
    """Two commits at a time until it is done: n rounds, of which none is done twice, take ceil(n/2) attempts."""
    times = 0
    while cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2):
        times += 1
        assert times < 20
    (done,) = tmp_path.glob("tiny-*")
    assert times + 1 == -(-len(table(undisturbed, "rounds")) // 2)
    assert difference(undisturbed, done) is None
    assert len(read_manifest(done)["resumed_at"]) == times


def test_a_committed_round_is_not_done_again(tmp_path, monkeypatch):
    """Stopped in round 3 of training: the resumed run begins with round 3, and trains no other."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    heard = []
    run(tmp_path, **SETTINGS, resume=True, emit=heard.append)
    trained = [e.round_number for e in heard if e.phase == "train" and e.row is not None and not e.finished]
    assert trained == [3]


def test_states_that_are_gone_are_not_taken_for_those_of_the_beginning(tmp_path, monkeypatch, undisturbed):
    """The clients' files of a training that was stopped in its third round are deleted: it is trained anew."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    for path in tmp_path.glob("tiny-*/checkpoint/clients/*/*.npz"):
        path.unlink()
    heard = []
    resumed = run(tmp_path, **SETTINGS, resume=True, emit=heard.append)
    trained = [e.round_number for e in heard if e.phase == "train" and e.row is not None and not e.finished]
    assert trained == [1, 2, 3]
    assert difference(undisturbed, resumed) is None


def test_a_damaged_commit_is_said(tmp_path, monkeypatch):
    """Cut to half its size: one line with the file and what to do."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    (commit,) = tmp_path.glob("tiny-*/checkpoint/commit.npz")
    commit.write_bytes(commit.read_bytes()[: commit.stat().st_size // 2])
    with pytest.raises(BadInput, match=r"commit\.npz.*cannot be read.*delete it"):
        run(tmp_path, **SETTINGS, resume=True)


def test_a_damaged_part_is_said_and_not_read_over(tmp_path, monkeypatch):
    """The first round's row is needed for the phase's sums: its part is named."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    (part,) = tmp_path.glob("tiny-*/tables/rounds/*train-00001.parquet")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(BadInput, match=r"train-00001\.parquet.*cannot be read"):
        run(tmp_path, **SETTINGS, resume=True)


def test_a_commit_of_another_model_is_not_taken(tmp_path, monkeypatch):
    """The same job with W = 6 was stopped at the same place, and its commit copied here."""
    for width in (4, 6):
        with monkeypatch.context() as patch:
            patch.setitem(SETTINGS, "model", {"width": width})
            assert cut_off(tmp_path / str(width), monkeypatch, Checkpoint, "save", 2)
    here, other = (next((tmp_path / width).glob("tiny-*/checkpoint/commit.npz")) for width in "46")
    shutil.copy(other, here)
    said = r"commit\.npz.*is the last commit of tiny-.*, not the last commit of tiny-.*; delete it"
    with pytest.raises(BadInput, match=said):
        run(tmp_path / "4", **SETTINGS, resume=True)


def test_a_manifest_with_another_configuration_is_not_taken(tmp_path, monkeypatch):
    """A learning rate was changed in manifest.json: what was served before had another."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    (path,) = tmp_path.glob("tiny-*/manifest.json")
    manifest = read_manifest(path.parent)
    manifest["config"]["recover"]["lr"] = 0.2
    path.write_text(json.dumps(manifest))
    refused = qdsim("resume", path.parent, "--engine", "inline")
    assert refused.returncode == 2
    assert "is not the one it began with" in refused.stderr


def test_what_a_cut_off_write_left_is_swept_away(tmp_path, monkeypatch):
    """A temporary file of an attempt that is gone."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    (folder,) = tmp_path.glob("tiny-*/tables/rounds")
    (folder / ".seed-0-shared-train-00003.parquet.1.tmp").write_bytes(b"half")
    run(tmp_path, **SETTINGS, resume=True)
    assert not list(folder.glob(".*"))


def test_the_command_resumes_a_run_by_its_folder(tmp_path, monkeypatch, undisturbed):
    """``qdsim resume RUN`` needs no job file; verify then finds them equal. Stopped after training and fine-tuning."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 6)
    (stopped,) = tmp_path.glob("tiny-*")
    done = qdsim("resume", stopped, "--engine", "inline")
    assert done.returncode == 0, done.stderr
    equal = qdsim("verify", undisturbed, stopped)
    assert (equal.returncode, equal.stdout) == (0, "equal\n")
    next((stopped / "tables" / "classes").glob("*relearn-00001.parquet")).unlink()
    same_lost = qdsim("verify", stopped, stopped)
    assert same_lost.returncode == 2
    assert "1 rounds that table rounds has are not in table classes" in same_lost.stderr
    other = qdsim("verify", undisturbed, stopped)
    assert (other.returncode, other.stderr) == (1, "")
    assert other.stdout.startswith("table classes: only the first run has a row of")


def qdsim(*arguments):
    """Run the command as a user does."""
    command = [sys.executable, "-m", "qdsim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_run_that_is_going_on_is_not_started_twice(tmp_path):
    """Its owner, this process, is alive; once it is gone the lock is taken over at once."""
    stopped = run(tmp_path)
    manifest = read_manifest(stopped)
    (stopped / "manifest.json").write_text(json.dumps(manifest | {"state": "running"}))
    with lock.held(stopped):
        refused = qdsim("resume", stopped, "--engine", "inline")
        assert refused.returncode == 2
        assert f"is being run by process {os.getpid()}" in refused.stderr
        assert "Traceback" not in refused.stderr
    dead = {"host": os.uname().nodename, "pid": 2**22 - 1, "started": "1"}
    (stopped / "lock.json").write_text(json.dumps(dead))
    with lock.held(stopped):
        assert json.loads((stopped / "lock.json").read_text())["pid"] == os.getpid()
    assert not (stopped / "lock.json").exists()


def test_a_driver_that_outlives_its_command_stops_when_the_run_is_taken_over(tmp_path):
    """Its owner's name is no longer in the lock: no further round is written."""

    def taken_over(event):
        if event.row is not None and event.round_number == 2:
            (path,) = tmp_path.glob("tiny-*/lock.json")
            path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "name": "another"}))

    with pytest.raises(TakenOver, match="has been taken over by process 1 on elsewhere"):
        run(tmp_path, emit=taken_over)
    (left,) = tmp_path.glob("tiny-*")
    assert table(left, "rounds")["round"].max() == 2


def test_who_wakes_after_another_has_finished_the_run_says_that_it_was_taken_over(tmp_path):
    """Not that a client's state cannot be written, though the folder for it is gone."""

    def finished_elsewhere(event):
        if event.row is not None and event.round_number == 2:
            (left,) = tmp_path.glob("tiny-*")
            (left / "lock.json").unlink()
            shutil.rmtree(left / "checkpoint")

    with pytest.raises(TakenOver, match="has been taken over by a process that has ended since"):
        run(tmp_path, emit=finished_elsewhere)


def test_a_lock_that_cannot_be_read_is_not_taken_for_a_dead_ones(tmp_path):
    """Its owner may be alive; a folder in its place cannot be read by anybody."""
    (tmp_path / "lock.json").mkdir()
    with pytest.raises(StorageFailed, match=r"lock\.json.*see that the storage is there"), lock.held(tmp_path):
        pass


def test_a_lock_of_another_host_holds_for_its_lease(tmp_path):
    """Fresh: refused. An hour old: taken over."""
    (tmp_path / "lock.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    with pytest.raises(BadInput, match="process 1 on elsewhere"), lock.held(tmp_path):
        pass
    before = time.time() - 3600
    os.utime(tmp_path / "lock.json", (before, before))
    with lock.held(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == []


def test_verify_names_the_first_difference(tmp_path, undisturbed):
    """Another value, a missing row, a row twice; clocks and places do not count."""
    other = tmp_path / "other"
    shutil.copytree(undisturbed, other)
    assert difference(undisturbed, other) is None
    frame = table(other, "classes")
    parts = sorted((other / "tables" / "classes").glob("*train-00002.parquet"))
    rows = frame[(frame["phase"] == "train") & (frame["round"] == 2)].copy()
    rows.loc[rows.index[3], "accuracy"] += 1e-9
    rows.to_parquet(parts[0])
    assert "phase train, round 2, class 3: accuracy is" in difference(undisturbed, other)
    parts[0].unlink()
    assert "only the first run has a row of seed 0, method shared, phase train, round 2" in difference(
        undisturbed, other
    )
    again = sorted((other / "tables" / "classes").glob("*train-00001.parquet"))[0]
    shutil.copy(again, again.with_name("twice.parquet"))
    assert "the second run has two rows of" in difference(undisturbed, other)
    again.write_bytes(b"nothing")
    with pytest.raises(BadInput, match="cannot be read"):
        difference(undisturbed, other)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs, cut off in training and after QuickDrop at the same places; they differ in a learning rate."""
    folder = tmp_path_factory.mktemp("two")
    for name, train in (("here", SETTINGS["train"]), ("there", SETTINGS["train"] | {"lr": 0.05})):
        for after in (2, 12):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(SETTINGS, "train", train)
                assert cut_off(folder / name / str(after), patch, Checkpoint, "save", after)
    return folder


@pytest.mark.parametrize(
    ("pattern", "after", "said"),
    [
        ("checkpoint/commit.npz", 2, "is the last commit of tiny-"),
        ("checkpoint/first-*.npz", 2, "is first updates of seed-0-shared of tiny-"),
        ("checkpoint/clients/*/*0-00002.npz", 2, r"is client \d after 0-00002 in seed-0-shared of tiny-"),
        ("models/*quickdrop*.npz", 12, "is the model of seed-0-quickdrop-class:9 of tiny-"),
        ("tables/rounds/*train-00001.parquet", 2, "holds rows of the run tiny-"),
        ("tables/stages/*finetune.parquet", 12, "holds rows of the run tiny-"),
    ],
)
def test_a_file_of_another_run_is_not_taken(tmp_path, two_runs, pattern, after, said):
    """It has the same names and shapes, and another learning rate behind it: the file is named."""
    out = tmp_path / "out"
    shutil.copytree(two_runs / "here" / str(after), out)
    (here, *_), (there, *_) = (
        sorted(folder.glob(f"tiny-*/{pattern}")) for folder in (out, two_runs / "there" / str(after))
    )
    shutil.copy(there, here)
    with pytest.raises(BadInput, match=said) as caught:
        run(out, **SETTINGS, resume=True)
    assert str(here) in str(caught.value)


def test_a_commit_that_its_rows_do_not_know_is_not_taken(tmp_path, monkeypatch):
    """One number of the model in commit.npz is another, in a file that is whole and of this run."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 2)
    (run_dir,) = tmp_path.glob("tiny-*")
    checkpoint = Checkpoint(run_dir)
    commit = checkpoint.load()
    commit.params["linear.bias"][0] += 1
    checkpoint.save(commit)
    with pytest.raises(BadInput, match=r"commit\.npz.*holds another model than the rows of seed-0-shared-train say"):
        run(tmp_path, **SETTINGS, resume=True)


def test_a_renamed_run_keeps_its_name_in_its_rows(tmp_path, monkeypatch, undisturbed):
    """Stopped, renamed, resumed: one run id, the first, in the manifest and in every row."""
    assert cut_off(tmp_path, monkeypatch, Checkpoint, "save", 4)
    (before,) = tmp_path.glob("tiny-*")
    renamed = before.rename(tmp_path / "mine")
    assert run(tmp_path, **SETTINGS, resume=renamed) == renamed
    assert read_manifest(renamed)["run_id"] == before.name
    assert {name for kind in ("rounds", "stages") for name in table(renamed, kind)["run_id"]} == {before.name}
    assert difference(undisturbed, renamed) is None


def test_a_run_that_was_taken_over_and_finished_stays_done(tmp_path):
    """The first owner was suspended for longer than its lease; then it fails, and writes nothing any more."""

    def taken_over(event):
        if event.row is not None and event.round_number == 2:
            (run_dir,) = tmp_path.glob("tiny-*")
            (run_dir / "lock.json").unlink()  # whoever took it over has finished, and given it back
            content = read_manifest(run_dir) | {"state": "done"}
            (run_dir / "manifest.json").write_text(json.dumps(content))
            (run_dir / "progress.json").unlink(missing_ok=True)
            raise ValueError("what wakes up fails")

    with pytest.raises(ValueError, match="what wakes up fails"):
        run(tmp_path, emit=taken_over)
    (left,) = tmp_path.glob("tiny-*")
    assert read_manifest(left)["state"] == "done"
    assert not (left / "progress.json").exists()
