"""The probe of ``qdsim plan --address``: one client's steps, measured on a node of the cluster."""

from typing import Any

import ray

from qdsim import probe
from qdsim.estimate import Costs
from qdsim.hosts import device_of
from qdsim.layout import Layout
from qdsim.plan import Plan
from qdsim.probe import Sample

PROBE_S = 300.0


def _measure(sample: Sample) -> tuple[Costs, float | None]:
    """Measure where the task runs; return the GPU's memory as well, if it has one."""
    import torch

    device = device_of(ray.get_runtime_context().get_accelerator_ids()["GPU"])
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    return probe.measure(sample, device), there


def measured_on(layout: Layout, plan: Plan) -> Costs:
    """Measure on one node, with as many tasks at once as will share it: its cores, or the actors of one GPU."""
    node = max(ray.nodes(), key=lambda node: (node["Resources"].get("GPU", 0), node["Resources"].get("CPU", 0)))  # type: ignore[no-untyped-call]
    cores = max(1, int(node["Resources"].get("CPU", 1)) // plan.job.cluster.threads)
    lanes = 1 if layout.gpus else min(cores, len(layout.clients))
    here = {"ray.io/node-id": node["NodeID"]}
    task: Any = ray.remote(_measure).options(num_cpus=0, num_gpus=1 if layout.gpus else 0, label_selector=here)
    sample = ray.put(probe.sample_of(plan))
    found = ray.get([task.remote(sample) for _ in range(lanes)], timeout=PROBE_S)
    return probe.average([costs for costs, _ in found])
