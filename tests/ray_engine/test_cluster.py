"""The cluster that is started here, as its processes are watched."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qdsim.errors import ClusterLost
from qdsim.ray_engine import cluster


@pytest.fixture
def raylet(tmp_path):
    """A process of that name, and nothing else of Ray."""
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    process = subprocess.Popen([tmp_path / "raylet", "60"])
    yield process
    process.kill()
    process.wait()


def noticed(watch):
    """Return what the watch says within 5 s."""
    give_up_s = time.monotonic() + 5
    while time.monotonic() < give_up_s:
        try:
            watch.check()
        except ClusterLost as error:
            return str(error)
        time.sleep(0.02)
    return None


@pytest.mark.parametrize("reaped", [False, True])
def test_a_lost_process_is_noticed(raylet, monkeypatch, reaped):
    """Also where somebody else has asked how it ended, so that there is no trace of it."""
    monkeypatch.setattr(cluster, "WATCH_S", 0.02)
    watch = cluster.Watch(lambda error: None)
    watch.start()
    time.sleep(0.5)
    watch.check()
    raylet.kill()
    if reaped:
        raylet.wait()
    assert noticed(watch).startswith("Ray on this machine has lost its raylet")
    watch.end()  # else this process would be ended


def test_a_process_that_ends_after_the_watch_is_not_missed(raylet, monkeypatch):
    """As it does when a run is over."""
    monkeypatch.setattr(cluster, "WATCH_S", 0.02)
    watch = cluster.Watch(lambda error: None)
    watch.start()
    time.sleep(0.2)
    watch.end()
    raylet.kill()
    time.sleep(0.2)
    watch.check()


def test_where_nobody_asks_the_last_words_are_said(tmp_path):
    """All wait for Ray: exit code 3 after the grace, with the words, and the other process is ended."""
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    shutil.copy(shutil.which("sleep"), tmp_path / "gcs_server")
    code = f"""
import subprocess, time
from qdsim.ray_engine import cluster
cluster.WATCH_S, cluster.GRACE_S = 0.02, 0.1
lost = subprocess.Popen(["{tmp_path}/raylet", "60"])
left = subprocess.Popen(["{tmp_path}/gcs_server", "60"])
print(left.pid, flush=True)
cluster.Watch(cluster._say).start()
time.sleep(0.5)
lost.kill()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("qdsim: Ray on this machine has lost its raylet")
    assert not Path(f"/proc/{done.stdout.strip()}/exe").exists()
