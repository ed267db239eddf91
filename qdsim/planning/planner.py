"""``qdsim plan``: does a job fit, where are its clients placed, and how long will it take?"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qdsim.data import datasets
from qdsim.errors import MissingData
from qdsim.experiment import plan as plans
from qdsim.experiment.config import Job
from qdsim.experiment.plan import Plan
from qdsim.experiment.work import Costs
from qdsim.models.device import CONTEXT_BYTES, choose_device, set_up
from qdsim.planning import estimate, gpus, probe, units
from qdsim.planning.estimate import MEASURED, Packing, PhaseTime, Within
from qdsim.planning.gpus import GpuModel
from qdsim.planning.layout import UNIT, Layout, Node, assign
from qdsim.planning.measured import Measured

RAY_SHARE = 0.7
"""Of a machine's memory that Ray gives to actors; the rest is for its object store."""
CPUS_PER_GPU, GB_PER_GPU = 8, 64
"""Of a machine that does not exist yet, unless the user says otherwise."""
ASSUMED_FLOPS = 5e12
"""What a GPU that nobody names sustains, in lack of a measurement: an assumption, and said to be one."""
LOW_SHARE, HIGH_SHARE = 0.125, 0.5
"""What a network of this size gets of a GPU's peaks, at the least and at the most: an assumption as well. The clocks of
the paper, on an RTX 2060, come to 4 % of its peak (Table 2) and to 70 % (Table 6)."""
GRADIENT_PASSES, MATCHING_PASSES = 3, 7
"""In forward passes: forward, backward to the inputs and to the weights; twice that and a tangent for matching."""
MAP_ACCESSES = 8
"""How often a pass reads or writes each feature map: convolution, normalisation, ReLU, pooling in turn."""
_HALFWAY = (LOW_SHARE * HIGH_SHARE) ** 0.5
ASSUMED = Within((_HALFWAY / HIGH_SHARE, _HALFWAY / LOW_SHARE))
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
    model: GpuModel | None = None
    """Of its GPUs, where they are only named."""


@dataclass(frozen=True)
class PlanReport:
    """What is to be expected of a job."""

    plan: Plan
    machines: Machines
    layout: Layout
    gpus: int
    """GPUs that the run holds."""
    gpu_bytes: int
    times: list[PhaseTime]
    storage_bytes: int
    notes: list[str]
    within: Within
    """How far off the times may be."""
    packings: list[Packing]
    """On GPUs: this job's way of sharing them, and others that fit."""
    measured: Measured | None = None
    """What a doctor's file says of them."""


def this_machine() -> Machines:
    """Return the machine that this runs on."""
    memory = RAY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = torch.cuda.device_count()
    there = min(gpus.memory_here(), default=None) if count else None
    return Machines([Node("here", float(os.cpu_count() or 1), count, memory, "here")], there, "this machine")


def imagined(
    count: int, gpu_memory: str | None, cpus: int | None, memory: str | None, model: str | None = None
) -> Machines:
    """Return one node with so many GPUs, which need not exist; ``model`` is a name of :data:`gpus.MODELS`."""
    cpus = cpus if cpus is not None else max(1, count) * CPUS_PER_GPU
    memory_bytes = units.read_size("--memory", memory) if memory else max(1, count) * GB_PER_GPU * 1e9
    node = Node("planned", float(cpus), count, RAY_SHARE * memory_bytes, "planned")
    named = gpus.find(model) if model else None
    of_gpu = named.memory_gb * 1e9 if named else None
    if gpu_memory:
        of_gpu = units.read_size("--gpu-memory", gpu_memory)
    kind = f" ({named.title})" if named else ""
    described = (
        f"a machine with {count} GPU{'s' if count != 1 else ''}{kind}, {cpus} CPUs and {units.size(memory_bytes)}"
    )
    return Machines([node], of_gpu, described, model=named)


def plan_job(
    job: Job,
    machines: Machines,
    measure: Measure,
    on_gpus: Within = MEASURED,
    measured: Measured | None = None,
) -> PlanReport:
    """Plan a job for machines; refuse what does not fit, with a change that does.

    ``on_gpus``: how far off the costs may be where the clients run on GPUs; those of cores are always measured.
    ``measured``: of GPUs like theirs; it takes the place of a probe.
    """
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
    gpu_memory = machines.gpu_bytes or (measured.memory_bytes if measured else None)
    place = machines.nodes, machines.most_gpus, gpu_memory, measured
    layout = estimate.layout_of(plan, *place)
    packed = max(len(group) for group in layout.clients)
    on_gpu = estimate.gpu_bytes(plan, packed, measured) if layout.gpus else 0
    if measured is not None and layout.gpus:
        notes += _above_expected(measured)
        within = MEASURED
    packing = estimate.packing_note(plan, layout, gpu_memory)
    notes += [packing] if packing else []
    held = _gpus_used(layout, machines) if layout.gpus else 0
    lanes = held or sum(max(1, int(node.cpus) // job.cluster.threads) for node in machines.nodes)
    costs = measured.costs(plan.points[0].model) if measured and layout.gpus else measure(layout, plan)
    within = on_gpus if layout.gpus else MEASURED
    times = estimate.phase_times(plan, layout, min(lanes, len(layout.clients)), costs, within)
    stored = estimate.storage_bytes(plan)
    ways = estimate.packings(plan, layout, *place) if layout.gpus else []
    used = measured if layout.gpus else None
    return PlanReport(plan, machines, layout, held, on_gpu, times, stored, notes, within, ways, used)


def _above_expected(measured: Measured) -> list[str]:
    """Say where a GPU took more memory than a run expects, which does not know of the measurement."""
    found = []
    if measured.context_bytes > CONTEXT_BYTES:
        took, expected = units.size(measured.context_bytes), units.size(CONTEXT_BYTES)
        found.append(f"CUDA took {took} a process where a run expects {expected}: set cluster.gpus_per_client as here")
    if measured.peak_share > 1:
        more = f"{100 * (measured.peak_share - 1):.0f} %"
        found.append(f"steps took {more} more memory than a run expects: set cluster.gpus_per_client as here")
    return found


def _gpus_used(layout: Layout, machines: Machines) -> int:
    """Return how many GPUs the actors use: Ray fills one of a node before the next."""
    on_each = UNIT // max(1, int(layout.gpus * UNIT))
    chosen = assign(layout, machines.nodes, len(layout.clients))
    if chosen is None:  # nodes are still to come
        return max(1, -(-len(layout.clients) // on_each))
    return sum(-(-chosen.count(i) // on_each) for i in range(len(machines.nodes)))


def measured_here(layout: Layout, plan: Plan) -> Costs:
    """Measure on this machine: on its cores, or on a GPU where the clients will run on GPUs."""
    if layout.gpus:
        sample = probe.probe_client(plan)
        set_up(sample.numerics)
        return probe.measure(sample, choose_device(["0"], cpu_fallback=plan.job.cluster.cpu_fallback))
    lanes = max(1, (os.cpu_count() or 1) // plan.job.cluster.threads)
    return probe.measure_here(probe.probe_client(plan), min(lanes, len(layout.clients)))


def assumed(layout: Layout, plan: Plan, model: GpuModel | None = None) -> Costs:
    """Take a GPU's speed for granted, where there is none to measure; cores are those of this machine.

    A pass takes as long as its operations or as its feature maps on their way from and to memory, whichever is more.
    """
    if not layout.gpus:
        return measured_here(layout, plan)
    network = plan.points[0].model
    if model is None:
        one_s = network.forward_flops / ASSUMED_FLOPS
    else:
        moved = MAP_ACCESSES * network.activation_bytes
        one_s = max(network.forward_flops / (model.tflops * 1e12), moved / (model.bandwidth_gb_s * 1e9)) / _HALFWAY
    return Costs(GRADIENT_PASSES * one_s, GRADIENT_PASSES * one_s, MATCHING_PASSES * one_s, one_s)
