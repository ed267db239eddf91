"""The probe of ``qdsim plan --address``: one client's steps, measured on a node of the cluster."""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from qdsim.errors import CannotPlace, QdsimError
from qdsim.experiment.plan import Plan
from qdsim.experiment.work import Costs
from qdsim.models.device import choose_device, set_up
from qdsim.planning import gpus, probe
from qdsim.planning.layout import Layout
from qdsim.planning.probe import ProbeClient

PROBE_S = 300.0


def _measure(sample: ProbeClient, cpu_fallback: bool) -> Costs:
    """Measure where the task runs."""
    gpu_ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    set_up(sample.numerics)
    return probe.measure(sample, choose_device(gpu_ids, cpu_fallback=cpu_fallback))


def gpu_memory() -> float | None:
    """Return the memory of the smallest GPU of the cluster; None where no node tells of any.

    This node is asked without a task, for which a process would have to start.
    """
    task: Any = ray.remote(gpus.memory_here)
    this = ray.get_runtime_context().get_node_id()
    with_gpus = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]  # type: ignore[no-untyped-call]
    away = [node for node in with_gpus if node != this]
    asked = [task.options(num_cpus=0, label_selector={"ray.io/node-id": node}).remote() for node in away]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=PROBE_S) if asked else ([], [])
    found = [memory for own in ray.get(answered) for memory in own]
    found += gpus.memory_here() if this in with_gpus else []
    return min(found, default=None)


def measured_on(layout: Layout, plan: Plan) -> Costs:
    """Measure on one node: on each of its cores at once, or on one GPU."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    node = max(alive, key=lambda node: (node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)))
    cores = max(1, int(node["Resources"].get("CPU", 1)) // plan.job.cluster.threads)
    lanes = 1 if layout.gpus else min(cores, len(layout.clients))
    here = {"ray.io/node-id": node["NodeID"]}
    task: Any = ray.remote(_measure).options(num_cpus=0, num_gpus=1 if layout.gpus else 0, label_selector=here)
    sample = ray.put(probe.probe_client(plan))
    try:
        return probe.average(
            ray.get([task.remote(sample, plan.job.cluster.cpu_fallback) for _ in range(lanes)], timeout=PROBE_S)
        )
    except GetTimeoutError:
        asked, fix = "a probe of one client's steps", "wait for other jobs to end, or plan with --gpus"
        raise CannotPlace(asked, f"no answer for {PROBE_S:g} s", fix) from None
    except RayTaskError as error:
        if isinstance(error.cause, QdsimError):
            raise error.cause from None
        raise
