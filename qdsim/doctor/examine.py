"""All checks, one after the other: this machine, then Ray, then through Ray each GPU, or a node where there is none."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qdsim.api import launch
from qdsim.data import datasets
from qdsim.doctor import machine
from qdsim.doctor.checks import Check, Report, about_this_machine, not_checked
from qdsim.errors import QdsimError
from qdsim.experiment import config
from qdsim.experiment import plan as plans
from qdsim.planning import estimate
from qdsim.ray_engine import environment

if TYPE_CHECKING:
    from qdsim.bench.fake_cuda import Tally
    from qdsim.doctor.steps import Expected
    from qdsim.models.device import DeviceInfo
    from qdsim.planning.layout import Node

PLACED_S = 90.0
"""For an actor to be given its GPU and to import torch."""
ANSWER_S = 600.0
"""For all checks of a device."""
POLL_S = 0.2
JOB = {"name": "doctor", "seeds": [0], "data": {"dataset": "cifar10"}, "synthetic": {"finetune": 1}}
"""What memory is estimated for: the paper's network and batch on images of this size."""
ONLY_ON_GPUS = (
    *("GPU", "client steps against the CPU", "graph capture", "launches against the count"),
    *("memory against the estimate", "memory cap"),
)
Tell = Callable[[str], None]


def examine(address: str | None, runs: str, tell: Tell) -> Report:
    """Make all checks; ``tell`` hears what is tried next."""
    tell("this machine: cores, memory, storage, ports, data")
    checks = machine.check_machine(runs)
    checks += _check_ray(address, tell)
    if not any(check.name == "GPU" and check.outcome == "pass" for check in checks):
        known = {check.name for check in checks if check.outcome != "not checked"}
        checks = [check for check in checks if check.name not in ONLY_ON_GPUS or check.name in known]
        checks += not_checked([name for name in ONLY_ON_GPUS if name not in known], "no GPU that torch can use")
    return Report(tuple(checks), about_this_machine())


def _check_ray(address: str | None, tell: Tell) -> list[Check]:
    """Start or join Ray, and have every GPU examined by an actor that it is granted to."""
    environment.prepare(address)  # before Ray is imported
    from qdsim.ray_engine import cluster

    tell("Ray: start it, or join it")
    began_s = time.perf_counter()
    try:
        with launch.on_ray(cluster.connected(config.validate(JOB).cluster, address)) as stop:
            took_s = round(time.perf_counter() - began_s, 1)
            nodes = cluster.nodes()
            gpus, cpus = sum(int(node.gpus) for node in nodes), sum(node.cpus for node in nodes)
            says = (
                f"there after {took_s} s: {len(nodes)} node{'s' * (len(nodes) > 1)} with {cpus:g} CPUs and {gpus} GPUs"
            )
            found = [Check("Ray", "pass", says, {"start_s": took_s, "nodes": len(nodes), "cpus": cpus, "gpus": gpus})]
            return found + _check_devices(nodes, stop.check, tell)
    except QdsimError as error:
        return [Check("Ray", "fail", str(error))]


def _check_devices(nodes: list["Node"], check: Callable[[], None], tell: Tell) -> list[Check]:
    """Start an actor for each GPU, or one where there is none, one after the other, and take what each has found."""
    from qdsim.doctor.actor import examiner
    from qdsim.doctor.steps import Expected

    plan = plans.build_plan(config.validate(JOB), datasets.stand_in("cifar10"))
    with_gpus = [node for node in nodes if node.gpus >= 1]
    expected = Expected(estimate.gpu_bytes(plan, 1), _counted() if with_gpus else {})
    asked = [(node, i) for node in with_gpus for i in range(int(node.gpus))] or [(nodes[0], -1)]
    # all actors first, and then their checks in turn: one at a time, so that none disturbs another's clock; those of a
    # node are there together, so that each holds a GPU of its own
    actors = [(node, i, examiner(node.node_id, gpu=i >= 0)) for node, i in asked]
    found: list[Check] = []
    answers: list[tuple[list[Check], DeviceInfo]] = []
    for node, i, actor in actors:
        where = f"node {nodes.index(node)}, {f'GPU {i}' if i >= 0 else 'CPU'}"
        tell(f"{where} ({node.name or node.node_id[:8]}): client steps, repeatability, memory, speed")
        made, device = _answer(actor, expected, where, check)
        found += made
        if device is not None:
            answers.append((made, device))
    return found + (compare_gpus(answers) if len(answers) > 1 else [])


def _counted() -> "dict[str, Tally]":
    """Count one more of the steps that are timed, at their size, on a GPU that does not exist."""
    from qdsim.bench import gpu_counts
    from qdsim.doctor.steps import CLASSES, PAPER
    from qdsim.planning.measured import MATCHING, PLAIN

    size = {"width": PAPER.width, "batch": PAPER.batch, "size": PAPER.size, "per_class": PAPER.samples // CLASSES}
    names = {PLAIN: "FedAvg", MATCHING: "training with matching"}
    return {kind: gpu_counts.of_steps(name, **size, scale=8)[0] for kind, name in names.items()}


def compare_gpus(answers: Sequence[tuple[list[Check], "DeviceInfo"]]) -> list[Check]:
    """See that each actor had a GPU of its own, and that all of one kind gave one hash."""
    uuids = [device.uuid for _, device in answers]
    shared = len(set(uuids)) < len(uuids)
    says = "two actors were given the same GPU" if shared else f"{len(uuids)} actors, {len(uuids)} GPUs"
    hashes: dict[str, set[str]] = {}
    for made, device in answers:
        found = {str(check.numbers["here"]) for check in made if "here" in check.numbers}
        hashes.setdefault(device.fingerprint, set()).update(found)
    differing = [kind for kind, found in hashes.items() if len(found) > 1]
    kinds = f"{len(hashes)} kind{'s' * (len(hashes) > 1)} of GPU"
    same = f"the bits of one kind differ: {', '.join(differing)}" if differing else f"one hash for each of {kinds}"
    return [
        Check("a GPU for each actor", "fail" if shared else "pass", says),
        Check("the same bits on all GPUs", "fail" if differing else "pass", same, {"kinds": len(hashes)}),
    ]


def _answer(
    actor: Any, expected: "Expected", where: str, check: Callable[[], None]
) -> "tuple[list[Check], DeviceInfo | None]":
    """Wait for what an actor finds; whatever happens to it is a check that has failed."""
    import ray
    from ray.exceptions import RayError

    def is_done(asked: Any, within_s: float) -> bool:
        give_up_s = time.monotonic() + within_s
        while not ray.wait([asked], timeout=POLL_S)[0]:
            check()
            if time.monotonic() > give_up_s:
                return False
        return True

    try:
        if not is_done(actor.ready.remote(), PLACED_S):
            return not_checked(["actor"], f"not placed within {PLACED_S:g} s: others hold the GPU", where), None
        asked = actor.examine.remote(expected, where)
        if not is_done(asked, ANSWER_S):
            return [Check("actor", "fail", f"no answer within {ANSWER_S:g} s", where=where)], None
        answer: tuple[list[Check], DeviceInfo | None] = ray.get(asked)
        return answer
    except RayError as error:
        return [Check("actor", "fail", str(error).splitlines()[0], where=where)], None
    finally:
        ray.kill(actor)
