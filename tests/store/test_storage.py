"""Runs on an object store, on a disk that fills up, and in folders that are not there."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import analysis
from qdsim.errors import BadInput, StorageFailed
from qdsim.experiment.checkpoint import Checkpoint
from qdsim.store import lock, storage, summary
from qdsim.store.run_directory import read_manifest
from qdsim.store.storage import Remote
from qdsim.store.verify import difference
from tests.experiment.test_resume import Stopped
from tests.runs import run

SETTINGS = {
    "methods": ["quickdrop"],
    "partition": {"clients": 4},
    "train": {"participation": 0.5},
    "relearn": {"rounds": 0},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing happened to, on a disk."""
    return run(tmp_path_factory.mktemp("undisturbed"), **SETTINGS)


@pytest.fixture(scope="module")
def bucket():
    """A server on this machine that speaks S3, and a bucket there."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    S3FileSystem(endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    yield f"s3://bucket/some/runs?region=us-east-1&endpoint_override={host}:{port}&scheme=http"
    server.stop()


def test_a_run_on_an_object_store_is_the_same_run(bucket, monkeypatch, undisturbed):
    """Stopped in its third round and resumed there; then shown, verified and analysed there. No temporary is left."""
    out = storage.folder(bucket)
    real, calls = Checkpoint.save, []

    def failing(self, commit):
        calls.append(commit)
        if len(calls) == 3:
            raise Stopped
        real(self, commit)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", failing)
        with pytest.raises(Stopped):
            run(out, **SETTINGS)
    assert [path.name.rpartition("-")[0][:4] for path in storage.inside(out)] == ["tiny"]
    heard = []
    found = run(out, **SETTINGS, resume=True, emit=heard.append)
    assert isinstance(found, Remote)
    assert [e.round_number for e in heard if e.phase == "train" and e.row is not None and not e.finished] == [3]
    assert difference(undisturbed, found) is None
    assert read_manifest(found)["state"] == "done"
    assert list(summary.stage_table(found)["method"]) == list(summary.stage_table(undisturbed)["method"])
    assert not storage.inside(found, ".*")
    assert not (found / "checkpoint").exists()
    loaded = analysis.load([bucket])
    assert list(loaded.runs["run_id"]) == [found.name]
    assert len(loaded.tables["rounds"]) == len(analysis.load(undisturbed).tables["rounds"])
    again = run(out, **SETTINGS)  # the trained state lies there as well
    assert analysis.load([str(again)]).tables["rounds"].query("phase == 'train'")["reused"].all()


@pytest.mark.ray
def test_lost_actors_find_their_states_on_an_object_store(cluster_address, bucket, undisturbed):
    """The owners write there and read from there; the driver does not see a synthetic set."""
    parts = bucket.split("?")
    out = storage.folder(f"{parts[0]}-on-ray?{parts[1]}")
    chaos = ["kill client 2 at train:2"]
    packed = {"clients_per_actor": 2}
    found = run(out, engine="ray", address=cluster_address, cluster=packed, chaos=chaos, **SETTINGS)
    assert difference(undisturbed, found) is None


def test_a_lock_on_an_object_store(bucket, monkeypatch):
    """One owner at a time; the lock goes with its owner."""
    monkeypatch.setattr(lock, "SETTLE_S", 0.0)
    path = storage.folder(bucket) / "locked"
    with lock.held(path), pytest.raises(BadInput, match=f"being run by process {os.getpid()}"), lock.held(path):
        pass
    with lock.held(path) as name:
        lock.check(path, name)
    assert not (path / "lock.json").exists()


def test_uris_that_are_refused():
    """Credentials would end up in logs; an unknown scheme is named; a file URI is a path."""
    with pytest.raises(BadInput, match="leave credentials to the environment") as refused:
        storage.folder("s3://user:verysecret@bucket/runs")
    assert "verysecret" not in str(refused.value)
    with pytest.raises(BadInput, match="leave credentials") as refused:
        storage.folder("abfs://c@account.dfs.core.windows.net/runs?sig=verysecret")
    assert "verysecret" not in str(refused.value)
    with pytest.raises(BadInput, match="no storage that can be opened: Unrecognized filesystem type"):
        storage.folder("floppy://a/runs")
    assert str(storage.folder("file:///some/runs")) == "/some/runs"


def test_a_storage_that_cannot_be_reached_is_not_taken_for_damage():
    """Nobody listens there: exit code 3, and no advice to delete what may be whole."""
    away = "s3://bucket/runs?region=us-east-1&endpoint_override=127.0.0.1:9&scheme=http"
    with pytest.raises(StorageFailed, match="see that the storage is there"):
        storage.folder(away)


def test_an_upload_that_is_interrupted_still_ends(bucket, monkeypatch):
    """The signal comes while the object is being written: it is there whole all the same."""
    path = storage.folder(bucket) / "object"
    real = Remote._put
    began = threading.Event()

    def slowly(self, data):
        began.set()
        time.sleep(0.5)
        real(self, data)

    def interrupt(*_):
        raise Stopped

    monkeypatch.setattr(Remote, "_put", slowly)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=lambda: began.wait() and os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Stopped):
            path.put(b"whole")
    finally:
        signal.signal(signal.SIGUSR1, before)
    for _ in range(50):
        if path.exists():
            break
        time.sleep(0.1)
    assert path.read_bytes() == b"whole"


def test_what_a_remote_shares_with_a_path():
    """Names, parents and neighbours; what follows the question mark stays at the end."""
    run_dir = Remote("s3://bucket/runs?region=x") / "tiny-1"
    assert str(run_dir / "tables") == "s3://bucket/runs/tiny-1/tables?region=x"
    assert (run_dir.name, str(run_dir.parent)) == ("tiny-1", "s3://bucket/runs?region=x")
    assert str(run_dir.with_name("tiny-2")) == "s3://bucket/runs/tiny-2?region=x"
    assert (run_dir / "clients.parquet").stem == "clients"
    assert str(Remote("hdfs:///user/runs") / "tiny-1") == "hdfs:///user/runs/tiny-1"


def test_elsewhere_a_file_is_moved_to_its_name():
    """A file system that is neither a disk nor an object store; pyarrow has one in memory."""
    path = Remote("mock://memory/x") / "file"
    path.parent.mkdir()
    storage.write(path, b"12")
    assert path.read_bytes() == b"12"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    path.unlink()
    path.unlink(missing_ok=True)
    assert not path.exists()


def test_a_run_that_will_not_fit_is_not_begun(tmp_path, monkeypatch, undisturbed):
    """6 rounds of three parts of 16 kB are 0.3 MB, models and synthetic sets some more: 0.2 MB are too little.

    The estimate covers what the run really wrote, and not many times over.
    """
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage._replace(free=200_000))
    with pytest.raises(StorageFailed, match=r"the run needs about 0\.\d MB, and 0\.2 MB are free; ") as refused:
        run(tmp_path / "not" / "there", **SETTINGS)
    assert not list(tmp_path.iterdir())
    estimated = 1e6 * float(str(refused.value).split("about ")[1].split()[0])
    written = sum(path.stat().st_size for path in undisturbed.parent.rglob("*") if path.is_file())
    assert written < estimated < 2.5 * written


FULL_DISK = """
    mount -t tmpfs -o size=20m tmpfs {out} || exit 77
    {qdsim} run {job} --engine inline --out {out} &
    until ls {out}/full-*/tables/rounds/*-00003.parquet > {log} 2>&1; do sleep 0.05; done
    dd if=/dev/zero of={out}/filler bs=64k > {log} 2>&1
    wait $!
    echo "exit $?"
    rm {out}/filler
    {qdsim} run {job} --engine inline --out {out} --resume > {log} 2>&1
    echo "exit $?"
    cp -r {out}/full-* {kept}
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_and_it_resumes(tmp_path):
    """A file system that really is full in mid-run: exit code 3 and one line; with more room the run goes on."""
    job, out = tmp_path / "full.toml", tmp_path / "out"
    out.mkdir()
    job.write_text(
        'name = "full"\nseeds = [0]\nmethods = ["quickdrop"]\nmodel = { width = 4, depth = 2 }\n'
        "partition = { clients = 4 }\ntrain = { rounds = 30, steps = 2, batch_size = 16 }\n"
        "unlearn = { steps = 2 }\nrecover = { rounds = 1, steps = 2 }\nrelearn = { rounds = 0 }\n"
        "synthetic = { scale = 10 }\n",
        encoding="utf-8",
    )
    script = textwrap.dedent(FULL_DISK).format(
        out=out, job=job, kept=tmp_path / "kept", log=tmp_path / "log", qdsim=f"{sys.executable} -m qdsim"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=300)
    if done.returncode in (1, 77) and "exit" not in done.stdout:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit 3", "exit 0"]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("qdsim: ")]
    assert "No space left on device (0.0 MB free); free some space, then qdsim resume continues" in said
    assert "Traceback" not in done.stderr
    undisturbed = tmp_path / "undisturbed"
    subprocess.run(
        [sys.executable, "-m", "qdsim", "run", str(job), "--engine", "inline", "--out", str(undisturbed)],
        check=True,
        capture_output=True,
    )
    (other,) = undisturbed.glob("full-*")
    assert difference(other, tmp_path / "kept") is None


def test_a_file_that_cannot_be_cleaned_up_is_a_failure_of_the_storage(tmp_path):
    """Neither written nor deleted, since its folder is none: exit code 3, and what was wrong first is said."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="Not a directory") as caught:
        storage.write(tmp_path / "file" / "manifest.json", b"{}")
    assert caught.value.exit_code == 3


def test_what_the_system_says_of_a_file_is_a_failure_of_the_storage():
    """Read-only and permission denied are; a socket's error and a missing file are not."""
    assert "run/x: Read-only" in str(storage.as_failure(OSError(errno.EROFS, "Read-only file system", "run/x")))
    assert storage.as_failure(PermissionError(errno.EACCES, "Permission denied", "run/x")).exit_code == 3
    assert storage.as_failure(OSError(errno.EACCES, "Permission denied")) is None
    assert storage.as_failure(FileNotFoundError(errno.ENOENT, "No such file", "run/x")) is None
    assert storage.as_failure(ValueError("x")) is None
