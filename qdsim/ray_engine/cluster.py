"""Where Ray is started or joined, and what its nodes offer."""

import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import ray
from ray._private import ray_constants, services
from ray.exceptions import AuthenticationError

from qdsim.errors import BadInput, CannotPlace, CannotReach, ClusterLost, Interrupted
from qdsim.experiment.sections import Cluster
from qdsim.planning.layout import Node
from qdsim.ray_engine.environment import how_to_authenticate

VITAL = ("gcs_server", "raylet")
"""Processes that a cluster cannot do without, by the names that the system has of them."""
KNOCK_S = 5.0
"""Longer than any network takes to make a connection; Ray itself waits for two minutes, and says so in C++."""
FRAME_HEADER = 9
"""Bytes of HTTP/2: three of the length, one of the type, one of flags, four of the stream."""
CLIENT_SCHEME = "ray://"
CLIENT_PORT = 10001
"""Of Ray's client server, where its address names none."""
WATCH_S = 0.1
GRACE_S = 5.0
"""From the loss of one to the end of this process, unless it ends by itself; none while it joins the cluster, where
Ray's own code would end it with code 1."""


def nodes() -> list[Node]:
    """Return the nodes of the cluster that are alive."""
    found = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            has = node["Resources"]
            memory = has.get("memory", 0.0)
            cpus, gpus = has.get("CPU", 0.0), int(has.get("GPU", 0))
            found.append(Node(node["NodeID"], cpus, gpus, memory, node.get("NodeManagerHostname", "")))
    return found


def free_nodes() -> list[Node]:
    """Return the nodes that are alive, each with what nobody holds of it at the moment."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    found = []
    for node in nodes():
        has = free.get(node.node_id, {})
        left = {key: float(has.get(key, 0.0)) for key in ("CPU", "GPU", "memory")}
        # no memory left is not the same as none known
        memory = max(left["memory"], 1.0) if node.memory_bytes else 0.0
        found.append(Node(node.node_id, left["CPU"], left["GPU"], memory, node.name))
    return found


def most_gpus() -> int | None:
    """Return how many GPUs an autoscaler may come to; None where there is no autoscaler."""
    from ray._private.state import state

    most = state.get_max_resources_from_cluster_config()
    return None if most is None else int(most.get("GPU", 0))


def free() -> dict[str, float]:
    """Return the CPUs and GPUs that nobody holds at the moment."""
    return {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}  # type: ignore[no-untyped-call]


def check_reachable(address: str | None) -> None:
    """Refuse an address where nobody listens, before Ray waits there; ``None`` is that of the environment, if any."""
    where = address or os.environ.get("RAY_ADDRESS")
    if not where or where == "local" or is_connected():
        return
    tried = _places(where)
    failed = ""
    for host, port in tried:
        try:
            if _speaks_grpc(host, port):
                return
            failed = f"what answers at {host}, port {port} is not Ray's head"
        except OSError as error:
            failed = f"nobody answers at {host}, port {port} ({error.strerror or error})"
    if failed:
        fix = "see that the head runs, and that this is its port, by default 6379; auto takes a cluster on this machine"
        raise CannotReach(where, failed, fix)


def _speaks_grpc(host: str, port: int) -> bool:
    """Tell whether a server speaks gRPC, as Ray's head does: the dashboard's port, for one, is open and does not.

    It says its settings, a frame of HTTP/2 of type 4, to whoever has said theirs. With TLS nothing can be told.
    """
    with socket.create_connection((host, port), timeout=KNOCK_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True
        try:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            answer = b""
            while len(answer) < FRAME_HEADER and (more := connection.recv(FRAME_HEADER - len(answer))):
                answer += more
        except OSError:
            return False
        return answer[3:5] == b"\4\0"


def _places(where: str) -> list[tuple[str, int]]:
    """Return where a cluster's head may listen; nothing where Ray alone can tell."""
    if where.startswith(CLIENT_SCHEME):
        named = where
    elif "://" in where:  # of somebody's own kind of cluster
        return []
    else:
        try:
            named = f"//{services.canonicalize_bootstrap_address(where) or ''}"
        except (ValueError, OSError):  # auto without a cluster, or no address: Ray says so at once
            return []
    given = [named] if where == "auto" else [named, where if where.startswith(CLIENT_SCHEME) else f"//{where}"]
    found = []
    for text in given:
        with suppress(ValueError):  # a port that is no number
            parts = urlsplit(text)
            port = parts.port or (CLIENT_PORT if where.startswith(CLIENT_SCHEME) else None)
            if parts.hostname and port:
                found.append((parts.hostname, port))
    return list(dict.fromkeys(found))


def is_connected() -> bool:
    """Tell whether this process is connected to a cluster: a notebook may be, and a worker of Ray Tune is."""
    return bool(ray.is_initialized())


@contextmanager
def _no_dashboard() -> Iterator[None]:
    """Have Ray take itself for one that was installed without its dashboard.

    ``include_dashboard=False`` leaves out the page only: Ray's agents load all that stands behind it, just when the
    first processes import torch. ``ray.init`` waits for the agents in steps of a second, and often takes one more then.
    """
    name = "ray.dashboard.optional_deps"
    before = sys.modules.pop(name, None)
    sys.modules[name] = None  # type: ignore[assignment]  # whoever imports it is told that it is not there
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have a cluster that is started meanwhile listen on this machine alone, as Ray does on macOS and Windows.

    Else its ports are open to the network. The variable that Ray has for it, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, would
    hold for every cluster that this process joins later, and for its children.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _session_folder() -> Path | None:
    """Return where the cluster that was started here keeps its logs and sockets."""
    node = getattr(ray._private.worker, "_global_node", None)
    return None if node is None else Path(node.get_session_dir_path())


def _forget_session(folder: Path | None) -> None:
    """Delete what a cluster that is over has left behind: Ray would keep a folder for every run."""
    if folder is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "session_latest"
    with suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == folder.name:
            latest.unlink()


class Watch:
    """Watches the processes of the cluster that was started here, of which it cannot do without one.

    Where one is gone Ray waits in C++, for up to a minute, and then ends this process with code 1. So whoever asks is
    told at once, and where nobody asks, since all wait for Ray, ``last_words`` are said and this process ends.
    """

    def __init__(self, last_words: Callable[[ClusterLost], None]):
        self.lost: ClusterLost | None = None
        self._last_words = last_words
        self._over, self._joined = threading.Event(), threading.Event()
        self._pids: dict[int, str] = {}

    def check(self) -> None:
        """Raise where one of them is gone."""
        if self.lost is not None:
            raise self.lost

    def start(self) -> None:
        """Watch from now on, in a thread."""
        threading.Thread(target=self._run, daemon=True).start()

    def joined(self) -> None:
        """Hear that this process has joined the cluster: from now on it asks, and is given time to."""
        self._joined.set()

    def end(self) -> None:
        """Watch no more: what ends from now on is meant to."""
        self._over.set()

    def kill(self) -> None:
        """End those that are left; asking the cluster to would take a minute. The others end with this process."""
        for pid in self._pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._over.wait(WATCH_S):
            self._find()
            gone = [name for pid, name in self._pids.items() if _state(pid) in ("", "Z")]
            if gone:
                fix = "see that there is memory enough; qdsim resume continues from the last commit"
                self.lost = ClusterLost(gone[0], "it was killed, or has ended by itself", fix)
                if not self._over.wait(GRACE_S if self._joined.is_set() else 0.0):
                    self._last_words(self.lost)
                    self.kill()
                    os._exit(self.lost.exit_code)
                return

    def _find(self) -> None:
        """Look for them among the children of this process."""
        for path in Path("/proc/self/task").glob("*/children") if len(self._pids) < len(VITAL) else ():
            with suppress(OSError, ValueError):
                for pid in map(int, path.read_text(encoding="utf-8").split()):
                    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
                    if name in VITAL:
                        self._pids[pid] = name


def _state(pid: int) -> str:
    """Return the state of a process, Z for one that has ended; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _say(error: ClusterLost) -> None:
    print(f"qdsim: {error}", file=sys.stderr, flush=True)


@contextmanager
def connected(
    wanted: Cluster, address: str | None, last_words: Callable[[ClusterLost], None] = _say
) -> Iterator[Callable[[], None]]:
    """Join the cluster at ``address``, or start one on this machine for the duration of the block.

    Yields what raises :class:`ClusterLost` where that one is gone, see :class:`Watch`; of a cluster that was joined Ray
    tells. A process that is connected already stays so: the run takes that cluster.
    """
    if is_connected():
        if address is not None:
            why = "this process is connected to a cluster already: leave the address out, or call ray.shutdown() first"
            raise BadInput("--address", address, why)
        yield lambda: None
        return
    watch = Watch(last_words)
    folder: Path | None = None
    if address is None and not os.environ.get("RAY_ADDRESS"):
        with _no_dashboard(), _on_loopback():
            watch.start()
            try:
                ray.init(
                    address="local",
                    num_cpus=wanted.local_cpus,
                    num_gpus=wanted.local_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    namespace="qdsim",
                )
            except Exception as error:  # of whichever of its processes did not start, or was lost meanwhile
                watch.end()
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                fix = "try again; its logs lie in session_latest/logs of its temporary directory, /tmp/ray"
                raise CannotPlace("Ray on this machine", f"that it did not start ({said})", fix) from error
        watch.joined()
        folder = _session_folder()
    else:
        where = address or os.environ["RAY_ADDRESS"]
        check_reachable(where)
        try:
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, namespace="qdsim")
        except AuthenticationError as error:
            raise CannotReach(where, error.message, how_to_authenticate()) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            fix = f"see that it runs there; if it does, its token may be another: {how_to_authenticate()}"
            raise CannotReach(where, str(error).splitlines()[0], fix) from None
    try:
        yield watch.check
    except Interrupted:
        raise
    except BaseException as error:
        folder = None  # its logs may say why
        if watch.lost is not None:
            raise watch.lost from error
        raise
    finally:
        watch.end()
        if watch.lost is not None:
            watch.kill()
        else:
            ray.shutdown()
            _forget_session(folder)
