"""A cluster of three hosts on one machine, without a container: network namespaces on a bridge.

Each host has its own address, name, processes, home, ``/tmp/ray`` and ``/dev/shm``; they share the other files. The
bridge has an address of its own, so that commands from outside reach the head as from another machine.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 180.0
MEMORY = 80 * 2**20
"""Of each object store: Ray takes no less than 75 MiB."""
RECEIVED = 'Type="Received"'
NAMES = ("head", "worker1", "worker2")
OWN_WORLD = "unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc"


class NoNamespaces(Exception):
    """This machine, or this user, cannot make network namespaces."""


@dataclass(frozen=True)
class ThreeHosts:
    """A running cluster: head without CPUs and two workers with two each, token authentication on."""

    address: str
    """Of the dashboard, for commands that submit jobs."""
    home: Path
    """A home with the cluster's token in it."""
    nodes: dict[str, str]
    """Node ids by the names of their hosts."""
    metrics: dict[str, str]
    """Where each host tells what it measures, by the same names."""

    @property
    def token(self) -> str:
        """The cluster's token, which nobody else may know."""
        return (self.home / ".ray" / "auth_token").read_text()

    def get(self, path: str) -> str:
        """Fetch a page of the dashboard."""
        return _get(f"{self.address}{path}", self.token).decode()

    def received_bytes(self, name: str) -> float:
        """Return how much of objects has come to a host from other hosts since it was started."""
        lines = _get(self.metrics[name], self.token).decode().splitlines()
        return sum(float(l.split()[-1]) for l in lines if l.startswith("ray_object_manager_bytes{") and RECEIVED in l)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user's command: nothing of Ray's in it but what its home holds."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "QDSIM_")) and "proxy" not in k.lower()}
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
    return kept | {"HOME": str(home), "PATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


def make_home(folder: Path, token: str | None) -> Path:
    """Make a home, with a token in it that only its owner may read, or without one."""
    folder.mkdir(parents=True)
    if token is not None:
        (folder / ".ray").mkdir()
        (folder / ".ray" / "auth_token").touch(mode=0o600)
        (folder / ".ray" / "auth_token").write_text(token)
    return folder


@contextlib.contextmanager
def three_hosts(folder: Path) -> Iterator[ThreeHosts]:
    """Start the cluster; at the end nothing of it is left. ``folder`` is for homes and logs."""
    token, unique = secrets.token_hex(32), secrets.token_hex(3)
    with _network(f"qd{unique}") as (namespaces, addresses):
        started = []
        try:
            for name in NAMES:
                home = make_home(folder / name, token)
                started.append(_start(namespaces[name], name, home, addresses, folder / f"{name}.log"))
                if name == "head":
                    until(lambda: _listening(addresses["head"], 6379), "the head listens", started)
            url = f"http://{addresses['head']}:8265"
            until(lambda: _answers(f"{url}/api/jobs/", token), "the job server answers", started)
            until(lambda: len(_nodes(url, token)) == len(NAMES), "all nodes have joined", started)
            nodes = _nodes(url, token)
            ids = {name: node["nodeId"] for name, node in nodes.items()}
            metrics = {n: f"http://{addresses[n]}:{node['metricsExportPort']}/metrics" for n, node in nodes.items()}
            yield ThreeHosts(url, make_home(folder / "user", token), ids, metrics)
        finally:
            for process in started:
                process.kill()  # and with unshare's first process all that the host runs
            for process in started:
                process.wait()
            until(lambda: not any(_run(f"ip netns pids {n}") for n in namespaces.values()), "all have ended")


@contextlib.contextmanager
def _network(unique: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Make a bridge and a namespace for each host; yield the namespaces and the addresses by the hosts' names."""
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    for program in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(program) is None:
            raise NoNamespaces(f"there is no {program} here (iproute2, util-linux)")
    subnet = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"  # for tests between networks, by RFC 2544
    namespaces = {name: f"{unique}-{name}" for name in NAMES}
    addresses = {name: f"{subnet}.{i + 1}" for i, name in enumerate(NAMES)}
    with contextlib.ExitStack() as made:
        try:
            _run(f"ip link add {unique} type bridge")
            made.callback(_run, f"ip link delete {unique}")
            _run(f"ip address add {subnet}.254/24 dev {unique}")
            _run(f"ip link set {unique} up")
            for i, (name, space) in enumerate(namespaces.items()):
                _run(f"ip netns add {space}")
                made.callback(_run, f"ip netns delete {space}")  # both ends of its cable go with it
                _run(f"ip link add {unique}v{i} type veth peer name eth0 netns {space}")
                _run(f"ip link set {unique}v{i} master {unique} up")
                _run(f"ip -netns {space} address add {addresses[name]}/24 dev eth0")
                _run(f"ip -netns {space} link set eth0 up")
                _run(f"ip -netns {space} link set lo up")
            _run(f"{OWN_WORLD} mount -t tmpfs tmpfs /dev/shm")
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        yield namespaces, addresses


def _start(namespace: str, name: str, home: Path, addresses: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start Ray on a host. The shell stays as its first process, and reaps what is left behind."""
    head = f"--head --port=6379 --include-dashboard=true --dashboard-host={addresses[name]} --num-cpus=0"
    role = head if name == "head" else f"--address={addresses['head']}:6379 --num-cpus=2"
    ray = f"ray start {role} --node-ip-address={addresses[name]} --num-gpus=0 --object-store-memory={MEMORY} --block"
    script = (
        "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm"
        f" && hostname {name} && {ray}; exit 1"
    )
    command = ["ip", "netns", "exec", namespace, *OWN_WORLD.split(), "sh", "-c", script]
    variables = environment(home) | {"RAY_AUTH_MODE": "token", "RAY_metrics_report_interval_ms": "1000"}
    variables.pop("PYTHONPATH", None)  # the code comes with the job
    with open(log, "wb") as output:
        return subprocess.Popen(command, env=variables, cwd=home, stdout=output, stderr=subprocess.STDOUT)


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def until(
    true: Callable[[], object], what: str, processes: Sequence[subprocess.Popen[bytes]] = (), at_most_s: float = READY_S
) -> None:
    """Wait for something to become true, which it does not without these processes."""
    begun_s = time.monotonic()
    while not true():
        ended = [process.args[3] for process in processes if process.poll() is not None]  # type: ignore[index]
        assert not ended, f"{ended} ended before {what}"
        assert time.monotonic() - begun_s < at_most_s, f"not within {at_most_s:g} s: {what}"
        time.sleep(0.3)


def _listening(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def _get(url: str, token: str) -> bytes:
    """Fetch a page of the dashboard, past any proxy."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        return bytes(answer.read())


def _answers(url: str, token: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(_get(url, token))
    return False


def _nodes(url: str, token: str) -> dict[str, dict[str, Any]]:
    """Return what Ray knows of the nodes that are alive, by the names of their hosts."""
    with contextlib.suppress(OSError, KeyError):
        summary = json.loads(_get(f"{url}/nodes?view=summary", token))["data"]["summary"]
        return {node["hostname"]: node["raylet"] for node in summary if node["raylet"].get("state") == "ALIVE"}
    return {}
