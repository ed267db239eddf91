"""``qdsim plan``: does a job fit, where are its clients placed, and how long will it take?"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qdsim.data import datasets
from qdsim.errors import BadInput, CannotPlace, MissingData
from qdsim.experiment import plan as plans
from qdsim.experiment.config import Job
from qdsim.experiment.plan import Plan
from qdsim.planning import estimate, probe
from qdsim.planning.estimate import Costs, PhaseTime
from qdsim.planning.layout import UNIT, Layout, Node, assign

RAY_SHARE = 0.7
"""Of a machine's memory that Ray gives to actors; the rest is for its object store."""
CPUS_PER_GPU, GB_PER_GPU = 8, 64
"""Of a machine that does not exist yet, unless the user says otherwise."""
ASSUMED_FLOPS = 5e12
"""What a GPU sustains on networks of this size, in lack of a measurement: an assumption, and said to be one."""
GRADIENT_PASSES, MATCHING_PASSES = 3, 7
"""In forward passes: forward, backward to the inputs and to the weights; twice that and a tangent for matching."""
Measure = Callable[[Layout, Plan], Costs]


@dataclass(frozen=True)
class Machines:
    """Where a job is to run."""

    nodes: list[Node]
    gpu_bytes: float | None
    """Memory of a GPU, where it is known."""
    described: str
    most_gpus: int | None = None
    """How many an autoscaler may come to; None where there is none."""


@dataclass(frozen=True)
class PlanReport:
    """What is to be expected of a job."""

    plan: Plan
    machines: Machines
    layout: Layout
    lanes: int
    """How many client steps run at once."""
    gpus: int
    """GPUs that the run holds."""
    gpu_bytes: int
    times: list[PhaseTime]
    storage_bytes: int
    notes: list[str]


def this_machine() -> Machines:
    """Return the machine that this runs on."""
    memory = RAY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = torch.cuda.device_count()
    there = torch.cuda.get_device_properties(0).total_memory if gpus else None
    return Machines([Node("here", float(os.cpu_count() or 1), gpus, memory, "here")], there, "this machine")


def imagined(gpus: int, gpu_memory: str | None, cpus: int | None, memory: str | None) -> Machines:
    """Return one node with so many GPUs, which need not exist."""
    cpus = cpus if cpus is not None else max(1, gpus) * CPUS_PER_GPU
    memory_bytes = size_bytes("--memory", memory) if memory else max(1, gpus) * GB_PER_GPU * 1e9
    node = Node("planned", float(cpus), gpus, RAY_SHARE * memory_bytes, "planned")
    of_gpu = size_bytes("--gpu-memory", gpu_memory) if gpu_memory else None
    described = f"a machine with {gpus} GPUs, {cpus} CPUs and {memory_bytes / 1e9:g} GB"
    return Machines([node], of_gpu, described)


def size_bytes(option: str, text: str) -> float:
    """Read a size such as 24GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise BadInput(option, text, "write a size such as 24GB or 500MB")
    unit = (found[2] or "").upper()
    base = 1024.0 if unit.endswith("I") else 1000.0
    return float(found[1]) * float(base ** " KMGT".index(unit[:1] or " "))


def plan_job(job: Job, machines: Machines, measure: Measure) -> PlanReport:
    """Plan a job for machines; refuse what does not fit, with a change that does."""
    notes = []
    wanted = job.data
    try:
        dataset = datasets.load(wanted.dataset, wanted.root, verify=wanted.verify, size=wanted.size)
    except MissingData:
        if wanted.dataset not in datasets.SHAPES:
            raise
        dataset = datasets.stand_in(wanted.dataset)
        notes.append(dataset.note)
    plan = plans.build_plan(job, dataset)
    layout = estimate.layout_of(plan, machines.nodes, machines.most_gpus)
    packed = max(len(group) for group in layout.clients)
    on_gpu = estimate.gpu_bytes(plan, packed) if layout.gpus else 0
    if layout.gpus and machines.gpu_bytes:
        _check_gpu_memory(layout, on_gpu, machines, plan.max_clients)
    held = _gpus_used(layout, machines) if layout.gpus else 0
    lanes = held or sum(max(1, int(node.cpus) // job.cluster.threads) for node in machines.nodes)
    costs = measure(layout, plan)
    times = estimate.phase_times(plan, layout, min(lanes, len(layout.clients)), costs)
    return PlanReport(plan, machines, layout, lanes, held, on_gpu, times, estimate.storage_bytes(plan), notes)


def _gpus_used(layout: Layout, machines: Machines) -> int:
    """Return how many GPUs the actors use: Ray fills one of a node before the next."""
    on_each = UNIT // max(1, int(layout.gpus * UNIT))
    chosen = assign(layout, machines.nodes, len(layout.clients))
    if chosen is None:  # nodes are still to come
        return max(1, -(-len(layout.clients) // on_each))
    return sum(-(-chosen.count(i) // on_each) for i in range(len(machines.nodes)))


def _check_gpu_memory(layout: Layout, needed: int, machines: Machines, clients: int) -> None:
    """Refuse more actors on a GPU than its memory holds."""
    there = machines.gpu_bytes or 0.0
    together = UNIT // int(layout.gpus * UNIT)
    fit = int(there // needed)
    if together <= fit:
        return
    fix = "set cluster.micro_batch lower, or take a smaller model.width"
    if fit:
        packed = -(-clients // int(fit * sum(node.gpus for node in machines.nodes)))
        share = UNIT // fit / UNIT
        fix = f"set cluster.gpus_per_client to {share:g} and cluster.clients_per_actor to {packed}"
    asked = f"{together} actors of {needed / 1e9:.1f} GB on a GPU"
    raise CannotPlace(asked, f"{there / 1e9:.1f} GB there, which hold {fit}", fix, layout.table(machines.nodes))


def measured_here(layout: Layout, plan: Plan) -> Costs:
    """Measure on this machine: on its cores, or on a GPU where the clients will run on GPUs."""
    if layout.gpus:
        return probe.measure(probe.probe_client(plan), torch.device("cuda:0"))
    lanes = max(1, (os.cpu_count() or 1) // plan.job.cluster.threads)
    return probe.measure_here(probe.probe_client(plan), min(lanes, len(layout.clients)))


def assumed(layout: Layout, plan: Plan) -> Costs:
    """Take a GPU's speed for granted, where there is none to measure; cores are those of this machine."""
    if not layout.gpus:
        return measured_here(layout, plan)
    one_s = plan.points[0].model.forward_flops / ASSUMED_FLOPS
    return Costs(GRADIENT_PASSES * one_s, GRADIENT_PASSES * one_s, MATCHING_PASSES * one_s, one_s)
