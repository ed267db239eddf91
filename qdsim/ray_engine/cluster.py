"""Where Ray is started or joined, and what its nodes offer."""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray._private import ray_constants
from ray.exceptions import AuthenticationError

from qdsim.errors import CannotPlace, CannotReach, Interrupted
from qdsim.experiment.sections import Cluster
from qdsim.planning.layout import Node
from qdsim.ray_engine.environment import how_to_authenticate


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


@contextmanager
def connected(wanted: Cluster, address: str | None) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on this machine for the duration of the block."""
    folder: Path | None = None
    if address is None and not os.environ.get("RAY_ADDRESS"):
        with _no_dashboard(), _on_loopback():
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
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                fix = "try again; its logs lie in session_latest/logs of its temporary directory, /tmp/ray"
                raise CannotPlace("Ray on this machine", f"that it did not start ({said})", fix) from error
        folder = _session_folder()
    else:
        where = address or os.environ["RAY_ADDRESS"]
        try:
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, namespace="qdsim")
        except AuthenticationError as error:
            raise CannotReach(where, error.message, how_to_authenticate()) from None
        except (ConnectionError, ValueError, RuntimeError) as error:
            fix = f"see that it runs there; if it does, its token may be another: {how_to_authenticate()}"
            raise CannotReach(where, str(error).splitlines()[0], fix) from None
    try:
        yield
    except Interrupted:
        raise
    except BaseException:
        folder = None  # its logs may say why
        raise
    finally:
        ray.shutdown()
        _forget_session(folder)
