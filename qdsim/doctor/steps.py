"""Client steps on one device, tried with a made-up client: right, repeatable, without waits, how large, how fast.

``python -m qdsim.doctor.steps DEVICE SHARE`` prints the hash of a training step: what a fresh process comes to, with so
much of the GPU's memory. With ``hold`` behind it, it says how much torch has allocated, and stays until its input ends.
"""

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from qdsim import seeds
from qdsim.algorithms import distillation, fedavg, quickdrop
from qdsim.algorithms.history import History
from qdsim.algorithms.methods import METHODS
from qdsim.algorithms.phase import Phase, RoundContext
from qdsim.algorithms.settings import Distillation, Hyperparameters, Recover, Relearn, Train, Unlearn
from qdsim.bench.fake_cuda import Tally
from qdsim.bench.gpu_counts import estimate_ms
from qdsim.data.clients import ClientState
from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import ForgetSet, UnlearningRequest, View
from qdsim.doctor.checks import Check, Number
from qdsim.federation import measures
from qdsim.models import params as P
from qdsim.models.compute import Compute, make_compute
from qdsim.models.convnet import ConvNet
from qdsim.models.device import CONTEXT_BYTES, limit_memory, set_up
from qdsim.models.numerics import Numerics
from qdsim.models.params import Params
from qdsim.planning import gpus
from qdsim.planning.layout import UNIT
from qdsim.planning.measured import MATCHING, MEMORY, PLAIN, SPEED, speed_numbers
from qdsim.planning.planner import GRADIENT_PASSES, MATCHING_PASSES

CLASSES = 10
IMAGES = "synthetic images"
FLOAT64_TOLERANCE, FLOAT32_TOLERANCE = 1e-9, 1e-4
"""Largest difference to another way of computing the same, of the largest entry."""
FRESH_S = 300.0
HELD = "held"
SYNC_SAYS = "synchronizing CUDA operation"
"""In the warning that torch gives under ``set_sync_debug_mode``."""
GRAPH_STEPS = 12
MOST_KERNELS = 2
"""Kernels of a step, in terms of the operations counted: cuDNN and cuBLAS may take several for one."""
ROOF_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices whose product is taken for the fastest that a device computes."""


@dataclass(frozen=True)
class Trial:
    """How large the network and the steps are."""

    width: int
    size: int
    batch: int
    steps: int
    samples: int


SMALL = Trial(width=8, size=16, batch=32, steps=2, samples=40)
"""For comparing: every step of every method, on two ways of computing and in two precisions."""
PAPER = Trial(width=128, size=32, batch=256, steps=2, samples=512)
"""The paper's network and batch: for memory and speed."""


@dataclass(frozen=True)
class Setting:
    """A client, the model that it begins with, and how it computes."""

    client: ClientState
    params: Params
    hyper: Hyperparameters
    compute: Compute


@dataclass(frozen=True)
class Expected:
    """What a device is compared with, found beforehand by counting, without it."""

    memory_bytes: int = 0
    """What ``qdsim plan`` expects of the paper's steps, CUDA's own included."""
    steps: Mapping[str, Tally] = field(default_factory=dict)
    """Of kinds of steps at the paper's size: what one more of them asks of a GPU."""


def setting(
    trial: Trial,
    device: torch.device,
    dtype: torch.dtype,
    *,
    autograd: bool = False,
    cuda_graphs: Literal["off", "on"] = "off",
) -> Setting:
    """Return a client with random images; the same on every device."""
    model = ConvNet(3, trial.size, CLASSES, width=trial.width, depth=3, autograd=autograd)
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (trial.samples, 3, trial.size, trial.size), dtype=np.uint8)
    labels = np.arange(trial.samples) % CLASSES
    client = ClientState(0, pool, Normalization((0.5,) * 3, (0.25,) * 3), np.arange(trial.samples), labels)
    synthetic = Distillation(scale=8, finetune=1)
    first = distillation.initial_set(client, synthetic, seeds.generator(0, "synthetic-init"), dtype)
    train = Train(rounds=1, steps=trial.steps, batch_size=trial.batch)
    hyper = Hyperparameters(
        train=train,
        unlearn=Unlearn(steps=trial.steps, batch_size=trial.batch),
        recover=Recover(rounds=1, steps=trial.steps, batch_size=trial.batch),
        relearn=Relearn(rounds=1, steps=trial.steps, batch_size=trial.batch),
        synthetic=synthetic,
        max_loss=float("inf"),
        model=model,
        methods={name: method.settings() for name, method in METHODS.items() if method.settings is not None},
    )
    params = model.init(torch.Generator().manual_seed(0), dtype)
    compute = make_compute(model, device, Numerics(), cuda_graphs)
    return Setting(replace(client, synthetic=first), params, hyper, compute)


def phases(hyper: Hyperparameters) -> Iterator[tuple[str, Phase]]:
    """Yield the phases of training and of every method, by their names."""
    yield PLAIN, fedavg.phase("train", hyper.train, View("real"))
    for phase in quickdrop.training(hyper):
        yield (MATCHING if phase.name == "train" else phase.name), phase
    by_class = UnlearningRequest("class:1", ForgetSet(classes=frozenset([1])))
    by_client = UnlearningRequest("client:1", ForgetSet(clients=frozenset([1])))
    for name, method in METHODS.items():
        request = by_class if method.supports("class") else by_client
        for phase in method.load().phases(hyper, hyper.methods.get(name), request, History()):
            yield f"{method.title}, {phase.name}", phase


def outcome(there: Setting, phase: Phase) -> dict[str, torch.Tensor] | None:
    """Return what a step leaves: the update and the synthetic images; None where the client has no data for it."""
    if not len(there.client.samples(phase.view)):
        return None
    ctx = RoundContext(0, "", phase.name, 1)
    client, update = phase.client_step(there.client, there.params, ctx=ctx, compute=there.compute)
    assert client.synthetic is not None
    return {**update.delta, IMAGES: client.synthetic.images}


def compare(device: torch.device) -> Check:
    """Compare every client step with another way of computing it: a GPU's with the CPU's, the CPU's with autograd's."""
    on_gpu = device.type == "cuda"
    against = "the CPU" if on_gpu else "autograd"
    worst: dict[str, Number] = {}
    wrong = []
    for dtype, tolerance in ((torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE)):
        here = setting(SMALL, device, dtype)
        other = setting(SMALL, torch.device("cpu"), dtype, autograd=not on_gpu)
        others, count = dict(phases(other.hyper)), 0
        name_of_worst, largest = "", 0.0
        for name, phase in phases(here.hyper):
            # fine-tuning takes 50 steps, over which float32's rounding grows: what matters is checked in float64
            if dtype == torch.float32 and name == "finetune":
                continue
            found, expected = outcome(here, phase), outcome(other, others[name])
            if found is None or expected is None:
                continue
            count += 1
            difference = largest_difference(found, expected)
            if not difference <= tolerance:
                wrong.append(f"{name} by {difference:.1e} in {str(dtype).removeprefix('torch.')}")
            if difference >= largest:
                name_of_worst, largest = name, difference
        key = str(dtype).removeprefix("torch.")
        worst |= {f"{key}_difference": largest, f"{key}_worst": name_of_worst}
        worst.setdefault("steps", count)
    name = f"client steps against {against}"
    if wrong:
        return Check(name, "fail", f"{len(wrong)} differ: {'; '.join(wrong[:3])}", worst)
    in_float64, in_float32 = (worst[f"{kind}_difference"] for kind in ("float64", "float32"))
    says = f"{worst['steps']} agree to {in_float64:.1e} in float64, {in_float32:.1e} in float32"
    return Check(name, "pass", says, worst)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any entry, in terms of the largest of the update, or of the images.

    Not of its own tensor's: a bias before a normalisation has no gradient but rounding.
    """
    found = 0.0
    for of_images in (False, True):
        names = [name for name in right if (name == IMAGES) == of_images and right[name].numel()]
        scale = max((float(right[name].abs().max()) for name in names), default=0.0) or 1.0
        differences = [float((left[name].cpu() - right[name].cpu()).abs().max()) / scale for name in names]
        found = max([found, *differences])
    return found


def hash_of_training(device: torch.device) -> str:
    """Return the hash of θ and S after a training step with matching."""
    here = setting(SMALL, device, torch.float32)
    phase = dict(phases(here.hyper))[MATCHING]
    left = outcome(here, phase)
    assert left is not None
    return P.sha256(left)[:16]


def repeat(device: torch.device) -> Check:
    """Train twice here, then in two fresh processes at the same time, one under a cap: all hashes are to be one."""
    here = [hash_of_training(device) for _ in range(2)]
    command = [sys.executable, "-m", "qdsim.doctor.steps", str(device)]
    pipe = subprocess.PIPE
    fresh = [subprocess.Popen([*command, share], stdout=pipe, stderr=pipe, text=True) for share in ("1.0", "0.4")]
    said = []
    for process in fresh:
        try:
            out, errors = process.communicate(timeout=FRESH_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = "", f"no answer for {FRESH_S:g} s"
        # the last word: libraries may say something of their own
        said.append(out.split()[-1] if process.returncode == 0 and out.split() else f"failed: {errors.strip()[-200:]}")
    hashes = [*here, *said]
    numbers: dict[str, Number] = {"here": here[0], "again": here[1], "fresh": said[0], "fresh_capped": said[1]}
    if len(set(hashes)) == 1:
        return Check("repeatable", "pass", "twice here, and in two fresh processes at once: one hash", numbers)
    return Check("repeatable", "fail", f"training again gives other bits: {', '.join(hashes)}", numbers)


def count_syncs(device: torch.device) -> Check:
    """Count how often the host waits for the GPU within an additional local step: what two steps more than two do."""
    name = "waits within a step"
    if device.type != "cuda":
        return Check(name, "not checked", "there is nothing to wait for on a CPU", vital=False)
    numbers: dict[str, Number] = {}
    for kind in (PLAIN, MATCHING, "QuickDrop, unlearn", "Retrain-Or, relearn"):
        counts = [_syncs_of(device, kind, steps) for steps in (2, 4)]
        numbers[kind] = (counts[1] - counts[0]) / 2
    most = max(float(count) for count in numbers.values())
    says = "none" if not most else f"up to {most:g}: launches cannot run ahead of the GPU"
    return Check(name, "fail" if most else "pass", says, numbers, vital=False)


def _syncs_of(device: torch.device, kind: str, steps: int) -> int:
    here = setting(replace(SMALL, steps=steps), device, torch.float32)
    phase = dict(phases(here.hyper))[kind]
    outcome(here, phase)  # the first allocates, and loads kernels
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outcome(here, phase)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNC_SAYS in str(warning.message) for warning in said)


def capture(device: torch.device) -> Check:
    """Capture a step as a CUDA graph, and compare what replaying it comes to with what the step itself does."""
    name = "graph capture"
    if device.type != "cuda":
        return Check(name, "not checked", "CUDA graphs are for GPUs", vital=False)
    numbers: dict[str, Number] = {}
    differing = []
    for kind in (PLAIN, MATCHING, "QuickDrop, unlearn"):
        left, times = [], []
        for wanted in ("off", "on"):
            here = setting(replace(SMALL, steps=GRAPH_STEPS), device, torch.float32, cuda_graphs=wanted)
            phase = dict(phases(here.hyper))[kind]
            outcome(here, phase)  # the first allocates, and loads kernels
            began_s = time.perf_counter()
            found = outcome(here, phase)
            times.append(1e3 * (time.perf_counter() - began_s) / GRAPH_STEPS)
            assert found is not None
            left.append(P.sha256(found)[:16])
        numbers |= {f"{kind}, ms": round(times[0], 3), f"{kind}, replayed, ms": round(times[1], 3)}
        differing += [kind] if left[0] != left[1] else []
    if differing:
        return Check(name, "fail", f"replayed, other bits come of {', '.join(differing)}", numbers, vital=False)
    says = f"the same bits; small steps with matching take {numbers[f'{MATCHING}, ms']} ms, replayed "
    says += f'{numbers[f"{MATCHING}, replayed, ms"]}: cluster.cuda_graphs = "auto" may be set'
    return Check(name, "pass", says, numbers, vital=False)


def count_launches(device: torch.device, steps: Mapping[str, Tally]) -> Check:
    """Compare the kernels of an additional step, as the profiler sees them, with what was counted without a GPU."""
    name = "launches against the count"
    if device.type != "cuda":
        return Check(name, "not checked", "launches nothing: no GPU", vital=False)
    numbers: dict[str, Number] = {}
    for kind, tally in steps.items():
        kernels = [_kernels_of(device, kind, steps) for steps in (1, 2)]
        numbers |= {kind: kernels[1] - kernels[0], f"{kind}, counted": tally.launches}
    said = [f"{numbers[kind]} kernels a step of {kind}, {numbers[f'{kind}, counted']} counted" for kind in steps]
    many = [kind for kind in steps if int(numbers[kind]) > MOST_KERNELS * int(numbers[f"{kind}, counted"])]
    return Check(name, "fail" if many else "pass", "; ".join(said), numbers, vital=False)


def _kernels_of(device: torch.device, kind: str, steps: int) -> int:
    here = setting(replace(PAPER, steps=steps), device, torch.float32)
    phase = dict(phases(here.hyper))[kind]
    outcome(here, phase)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        outcome(here, phase)
    on_device = [event.name for event in seen.events() or [] if str(event.device_type).endswith("CUDA")]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)


def context_bytes(device: torch.device) -> int:
    """Return what CUDA itself takes of a GPU for a process: what is gone while one holds it, without torch's tensors.

    Others must not change what they hold meanwhile.
    """
    before = torch.cuda.mem_get_info(device)[0]
    command = [sys.executable, "-m", "qdsim.doctor.steps", str(device), "1.0", "hold"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    give_up = threading.Timer(FRESH_S, process.kill)
    give_up.start()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith(HELD)), "")
        now = torch.cuda.mem_get_info(device)[0]
        process.stdin.close()
        process.stdout.read()
    finally:
        give_up.cancel()
        process.kill()
        process.wait()
    if not said:
        raise RuntimeError(f"a process beside this one could not use the GPU within {FRESH_S:g} s")
    return max(0, before - now - int(said.split()[1]))


def recommended_share(needed_bytes: int, total_bytes: int) -> float:
    """Return the share of a GPU that is enough for a client, in Ray's units and rounded down, so that all fit."""
    fit = max(1, total_bytes // max(needed_bytes, 1))
    return UNIT // fit / UNIT


def check_memory(device: torch.device, estimate_bytes: int) -> list[Check]:
    """Compare the peak of the paper's steps with what ``qdsim plan`` says, and see that a cap holds."""
    names = (MEMORY, "memory cap")
    if device.type != "cuda":
        return [Check(name, "not checked", "tells of a GPU's memory only", vital=False) for name in names]
    here = setting(PAPER, device, torch.float32)
    peaks: dict[str, Number] = {}
    for kind in (PLAIN, MATCHING, "finetune"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        outcome(here, dict(phases(here.hyper))[kind])
        peaks[kind] = torch.cuda.max_memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    most = max(int(peak) for peak in peaks.values())
    torch.cuda.empty_cache()
    context = context_bytes(device)
    share = recommended_share(max(estimate_bytes, most + context), total)
    numbers = peaks | {"peak_bytes": most, "context_bytes": context, "estimate_bytes": estimate_bytes}
    numbers |= {"expected_tensor_bytes": estimate_bytes - CONTEXT_BYTES, "total_bytes": total, "share": share}
    says = f"{most / 1e9:.2f} GB of tensors at most and {context / 1e9:.2f} of CUDA's own, expected "
    says += f"{estimate_bytes / 1e9:.2f} with {CONTEXT_BYTES / 1e9:.2f} of CUDA's"
    says += f"; {int(1 / share)} clients fit: cluster.gpus_per_client = {share:g}"
    fits = most + context <= estimate_bytes
    checks = [Check(names[0], "pass" if fits else "fail", says, numbers, vital=False)]
    return [*checks, _cap(device, total)]


def _cap(device: torch.device, total: int) -> Check:
    """Ask for more than a cap of a tenth; torch itself is to refuse it."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.1, device)
    try:
        torch.empty(int(0.2 * total), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return Check("memory cap", "pass", "a process that asks for more than its share is refused")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return Check("memory cap", "fail", "a process got twice its share of the GPU")


def measure_speed(device: torch.device, steps: Mapping[str, Tally]) -> Check:
    """Time the paper's steps, and compare their operations with those of a large matrix product on the same device.

    And with what the maker's numbers of a GPU come to, where it is one of those that are known: an estimate.
    """
    here = setting(PAPER, device, torch.float32)
    roof = _product_flops(device)
    synthetic = here.client.synthetic
    assert synthetic is not None
    matched = min(len(synthetic.labels), here.hyper.synthetic.batch)
    forward = here.hyper.model.forward_flops
    flops = {PLAIN: GRADIENT_PASSES * PAPER.batch * forward}
    flops[MATCHING] = flops[PLAIN] + MATCHING_PASSES * matched * forward
    known = gpus.named_by_driver(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    took_ms = {}
    numbers: dict[str, Number] = {"product_tflops": round(roof / 1e12, 3)}
    shares = []
    for kind, count in flops.items():
        phase = dict(phases(here.hyper))[kind]
        if device.type == "cuda":
            outcome(here, phase)  # the first loads kernels
        began_s = time.perf_counter()
        outcome(here, phase)
        step_s = (time.perf_counter() - began_s) / PAPER.steps
        shares.append(count / step_s / roof)
        took_ms[kind] = 1e3 * step_s
        numbers[f"{kind}, share of product"] = round(shares[-1], 3)
        if known is not None and kind in steps:
            numbers[f"{kind}, roofline ms (an estimate)"] = round(estimate_ms(steps[kind], known), 3)
    numbers |= speed_numbers(took_ms[PLAIN], took_ms[MATCHING], PAPER.batch, matched, forward)
    says = (
        f"{took_ms[PLAIN]:.2f} ms a step of {PAPER.batch} at W={PAPER.width}, with matching "
        f"{took_ms[MATCHING]:.2f}: {shares[0]:.0%} and {shares[1]:.0%} of a matrix product's rate"
    )
    if known is not None:
        estimates = [f"{estimate_ms(tally, known):.2f}" for tally in steps.values()]
        says += f"; by the maker's numbers of a {known.title} {' and '.join(estimates)} ms, an estimate"
    elif device.type == "cuda":
        says += "; no roofline: this GPU is not one of those that qdsim knows"
    return Check(SPEED, "pass", says, numbers, vital=False)


def _product_flops(device: torch.device) -> float:
    """Return how many operations a second a large product of matrices comes to."""
    n = ROOF_SIZE[device.type]
    a = torch.ones(n, n, device=device)
    seconds = []
    for _ in range(3):
        began_s = time.perf_counter()
        float((a @ a)[0, 0])  # waits for it
        seconds.append(time.perf_counter() - began_s)
    return float(2 * n**3 / min(seconds))


def evaluate(device: torch.device) -> Check:
    """Count right answers on this device and on the CPU, in float64: one more or less would be another accuracy."""
    counts = []
    for where in (device, torch.device("cpu")):
        here = setting(SMALL, where, torch.float64)
        rows, labels = here.client.indices, here.client.labels
        found = measures.count_correct(
            here.compute, here.params, here.client.pool, here.client.normalization, rows, labels
        )
        counts.append(int(found.correct.sum()))
    same = counts[0] == counts[1]
    says = f"{counts[0]} of {SMALL.samples} right" + ("" if same else f", {counts[1]} on the CPU")
    return Check("evaluation", "pass" if same else "fail", says, {"right": counts[0], "on_the_cpu": counts[1]})


def examine(device: torch.device, expected: Expected, where: str) -> list[Check]:
    """Make all checks of a device; one that raises has failed, and the others are made all the same."""
    found: list[Check] = []
    ways: dict[str, Callable[[], list[Check]]] = {
        "client steps": lambda: [compare(device)],
        "evaluation": lambda: [evaluate(device)],
        "repeatable": lambda: [repeat(device)],
        "waits within a step": lambda: [count_syncs(device)],
        "graph capture": lambda: [capture(device)],
        "launches against the count": lambda: [count_launches(device, expected.steps)],
        "memory": lambda: check_memory(device, expected.memory_bytes),
        "speed": lambda: [measure_speed(device, expected.steps)],
    }
    for name, way in ways.items():
        try:
            found += way()
        except Exception as error:
            cause = str(error).splitlines()[0] if str(error) else ""
            found.append(Check(name, "fail", f"{type(error).__name__}: {cause}"))
    return [replace(check, where=where) for check in found]


if __name__ == "__main__":
    set_up(Numerics())
    chosen = torch.device(sys.argv[1])
    limit_memory(chosen, float(sys.argv[2]))
    print(hash_of_training(chosen), flush=True)
    if sys.argv[3:] == ["hold"]:
        print(HELD, torch.cuda.memory_reserved(chosen), flush=True)
        sys.stdin.read()
