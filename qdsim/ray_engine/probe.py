"""The probe of ``qdsim plan --address``: one client's steps, measured on a node of the cluster."""

from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError

from qdsim.errors import CannotPlace
from qdsim.experiment.plan import Plan
from qdsim.federation.client_host import device_of
from qdsim.planning import probe
from qdsim.planning.estimate import Costs
from qdsim.planning.layout import Layout
from qdsim.planning.probe import ProbeClient

PROBE_S = 300.0


def _measure(sample: ProbeClient) -> Costs:
    """Measure where the task runs."""
    return probe.measure(sample, device_of(ray.get_runtime_context().get_accelerator_ids()["GPU"]))


def _gpu_memory() -> list[int]:
    """Return the memory of each GPU where the task runs; it takes none of it, so it need not wait for one."""
    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def gpu_memory() -> float | None:
    """Return the memory of the smallest GPU of the cluster; None where no node tells of any."""
    task: Any = ray.remote(_gpu_memory)
    with_gpus = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]  # type: ignore[no-untyped-call]
    asked = [task.options(num_cpus=0, label_selector={"ray.io/node-id": node}).remote() for node in with_gpus]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=PROBE_S) if asked else ([], [])
    found = [memory for own in ray.get(answered) for memory in own]
    return float(min(found)) if found else None


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
        return probe.average(ray.get([task.remote(sample) for _ in range(lanes)], timeout=PROBE_S))
    except GetTimeoutError:
        asked, fix = "a probe of one client's steps", "wait for other jobs to end, or plan with --gpus"
        raise CannotPlace(asked, f"no answer for {PROBE_S:g} s", fix) from None
