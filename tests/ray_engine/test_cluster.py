"""The cluster that is started here, as its processes are watched."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qdsim.errors import CannotReach, ClusterLost
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
    watch.joined()
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


@pytest.mark.parametrize(("grace_s", "joined"), [(0.1, "watch.joined()"), (600, "")], ids=["at work", "joining"])
def test_where_nobody_asks_the_last_words_are_said(tmp_path, grace_s, joined):
    """All wait for Ray: exit code 3 after the grace, with the words, and the other process is ended.

    While this process joins the cluster nobody can ask, and there is no grace.
    """
    shutil.copy(shutil.which("sleep"), tmp_path / "raylet")
    shutil.copy(shutil.which("sleep"), tmp_path / "gcs_server")
    code = f"""
import subprocess, time
from qdsim.ray_engine import cluster
cluster.WATCH_S, cluster.GRACE_S = 0.02, {grace_s}
lost = subprocess.Popen(["{tmp_path}/raylet", "60"])
left = subprocess.Popen(["{tmp_path}/gcs_server", "60"])
print(left.pid, flush=True)
watch = cluster.Watch(cluster._say)
watch.start()
{joined}
time.sleep(0.5)
lost.kill()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("qdsim: Ray on this machine has lost its raylet")
    assert not Path(f"/proc/{done.stdout.strip()}/exe").exists()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["web", "closes", "silent"])
def test_a_port_that_is_not_the_heads_is_refused(answer, monkeypatch):
    """A page as the dashboard's, one that hangs up, one that says nothing: Ray would wait there for two minutes."""
    monkeypatch.setattr(cluster, "KNOCK_S", 0.3)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        opened = []

        def serve():
            connection, _ = server.accept()
            opened.append(connection)
            connection.recv(100)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(CannotReach, match=f"what answers at 127.0.0.1, port {port} is not Ray's head; see that"):
            cluster.check_reachable(f"127.0.0.1:{port}")
        thread.join(5)
        for connection in opened:
            connection.close()


@pytest.mark.ray
def test_a_head_is_known_by_how_it_speaks(cluster_address, monkeypatch):
    """The real one of these tests, which asks for a token."""
    host, _, port = cluster_address.rpartition(":")
    assert cluster._speaks_grpc(host, int(port))
    cluster.check_reachable(cluster_address)
