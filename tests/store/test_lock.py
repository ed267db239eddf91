"""One owner at a time, and nothing written by one that was taken over from."""

import json
import os
import time
from functools import partial

import pytest
import torch

from qdsim.errors import BadInput, QdsimError
from qdsim.experiment.checkpoint import Checkpoint, Commit
from qdsim.experiment.plan import PhaseKey
from qdsim.store import lock
from qdsim.store.run_directory import Manifest, TableWriter, read_manifest


def taken_over(run_dir, **changes):
    """Have another process own the run."""
    other = {"name": "other", "host": "elsewhere", "pid": 7, "started": "1", **changes}
    (run_dir / "lock.json").write_text(json.dumps(other))


def test_an_owner_that_wakes_after_its_lease_writes_nothing(tmp_path):
    """Another has taken over, finished the run and given the lock back: the manifest says done, whoever else failed."""
    with lock.held(tmp_path) as name:
        suspended = Manifest(tmp_path, {"run_id": "r"}, lambda: lock.check(tmp_path, name))
        taken_over(tmp_path)
        Manifest(tmp_path, {"run_id": "r"}).finish("done", exit_code=0)
        with pytest.raises(QdsimError, match="taken over by process 7 on elsewhere"):
            suspended.finish("failed", exit_code=1)
        (tmp_path / "lock.json").unlink()
        with pytest.raises(QdsimError, match="taken over by a process that has ended since"):
            suspended.finish("failed", exit_code=1)
    assert read_manifest(tmp_path)["state"] == "done"
    assert not lock.owns(tmp_path, name)


def test_who_was_taken_over_from_writes_no_part_and_no_commit(tmp_path):
    """Rows, commits and joined tables: each is asked for the lock just before it is written."""
    Manifest(tmp_path, {"run_id": "r"})
    with lock.held(tmp_path) as name:
        check = partial(lock.check, tmp_path, name)
        writer, checkpoint = TableWriter(tmp_path, check), Checkpoint(tmp_path, check)
        key = PhaseKey(cell="", seed=0, method="shared", request="", phase="train")
        writer.append("classes", key.round_part(1), [{**key.columns(), "round": 1, "class": 0, "accuracy": 0.5}])
        written = sorted(tmp_path.rglob("*"))
        taken_over(tmp_path)
        for write in (
            lambda: writer.append("classes", key.round_part(2), [{**key.columns(), "round": 2, "class": 0}]),
            lambda: checkpoint.save(Commit(key, 1, False, {}, {"w": torch.zeros(1)})),
            lambda: checkpoint.note_served("key", key),
            lambda: checkpoint.clear(),
        ):
            with pytest.raises(QdsimError, match="taken over by process 7 on elsewhere"):
                write()
    kept = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert kept == [path for path in written if path.is_file()]


def test_another_process_space_is_not_asked_by_process_id(tmp_path, monkeypatch):
    """In a container of its own this host's name and process ids say nothing: the lease counts."""
    with lock.held(tmp_path):
        written = json.loads((tmp_path / "lock.json").read_text())
        assert set(written) == {"name", "host", "pid", "started", "boot", "pid_namespace"}
        monkeypatch.setattr(lock, "_process_space", lambda: {"boot": written["boot"], "pid_namespace": "pid:[1]"})
        monkeypatch.setattr(lock, "_started", lambda pid: None)  # there is no such process there
        with pytest.raises(BadInput, match=r"is being run by process .*try again in 60 s"), lock.held(tmp_path):
            pass


@pytest.mark.parametrize("alive", [True, False])
def test_a_lock_dated_ahead_is_watched_for_a_sign_of_life(tmp_path, monkeypatch, alive):
    """A day ahead, by a clock that was wrong: it blocks where its owner renews it, and no longer than it takes to see.

    Two beats of 0.05 s are waited for.
    """
    taken_over(tmp_path)
    tomorrow = time.time() + 86_400
    os.utime(tmp_path / "lock.json", (tomorrow, tomorrow))
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    real = time.sleep

    def sleep(seconds):
        real(seconds)
        if alive:
            os.utime(tmp_path / "lock.json")

    monkeypatch.setattr(lock.time, "sleep", sleep)
    if alive:
        with pytest.raises(BadInput, match="process 7 on elsewhere"), lock.held(tmp_path):
            pass
    else:
        with lock.held(tmp_path):
            assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
