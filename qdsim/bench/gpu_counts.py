"""What client steps ask of a GPU, counted on one that does not exist (``fake_cuda.py``), beside bare eager PyTorch.

The counts are the same on every machine. Milliseconds are an estimate: for each operation the longest of its FLOP, its
bytes and its launches, by data sheets and the shares of them that are assumed below.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qdsim.algorithms import distillation, federaser, fump, local_sgd, quickdrop, sga
from qdsim.algorithms.phase import RoundContext
from qdsim.algorithms.settings import Distillation, Stage
from qdsim.bench.fake_cuda import CUDA, Shapes, Tally, pretended
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.data.datasets import Normalization
from qdsim.data.forgetting import NOTHING, ForgetSet, UnlearningRequest, View
from qdsim.federation.client_host import ClientHost, Images, Shard
from qdsim.models.compute import make_compute
from qdsim.models.convnet import NORM_EPS, ConvNet
from qdsim.models.model import Model
from qdsim.models.numerics import Numerics
from qdsim.models.params import Params
from qdsim.planning import gpus
from qdsim.planning.gpus import GpuModel

NAME = "gpu-counts"
ABOUT = "what client steps ask of a GPU, counted without one"
WIDTH, BATCH, PER_CLASS, CLASSES, TESTED = 128, 256, 600, 10, 10_000
CASE = f"W={WIDTH}, batch {BATCH}"
MORE, FIRST = "one more step", "all else of a call"
BARE = "bare PyTorch, FedAvg"
UNITS = {
    "launches": "",
    "syncs": "",
    "uploads": "",
    "GB moved": "GB",
    "GFLOP": "GFLOP",
    "peak MB": "MB",
    "atomics": "",
}
CEILINGS: dict[str, dict[str, float]] = {
    "FedAvg": {"launches": 54, "GB moved": 2.9},
    "training with matching": {"launches": 250, "GB moved": 6},
    "recovery, augmented": {"launches": 60},
    "ascent, synthetic": {"launches": 60},
    "ascent, real": {"launches": 60},
    "test of 10,000 images": {"syncs": 10},
    "fine-tuning": {"peak MB": 2000},
}
"""Of one more step; of the whole call for a test and for fine-tuning's memory."""
MOST_SYNCS = 8
"""Of a whole client step."""

GPUS = {"RTX 2060": gpus.MODELS["rtx2060"], "A100": gpus.MODELS["a100"], "H100": gpus.MODELS["h100"]}
SUSTAINED, SUSTAINED_TENSOR, SUSTAINED_GBS = 0.6, 0.35, 0.8
"""The share of these peaks that matrices and maps of this size reach."""
KERNEL_S = 3e-6
"""The shortest that a kernel takes, with the gap to the next."""


@dataclass
class World:
    """One client on one device."""

    host: ClientHost
    params: Params
    stage: Stage
    settings: Distillation
    request: UnlearningRequest
    tested: int
    """Images of the test set."""
    owned: int
    """Images of the client."""
    ctx: RoundContext


def world(
    device: str,
    *,
    width: int = WIDTH,
    batch: int = BATCH,
    steps: int = 1,
    per_class: int = PER_CLASS,
    channels: int = 3,
    size: int = 32,
    classes: int = CLASSES,
    depth: int = 3,
    scale: int = 100,
    tested: int = 200,
    dtype: torch.dtype = torch.float32,
    precision: Any = "float32",
    micro_batch: Any = "auto",
    model: Model | None = None,
    cuda_graphs: Any = "off",
) -> World:
    """Make a client with as many images of each class, and a model."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    pool = rng.integers(0, 256, (max(len(labels), tested), channels, size, size), dtype=np.uint8)
    model = model or ConvNet(channels, size, classes, width, depth)
    numerics = Numerics(precision=precision, micro_batch=micro_batch)
    compute = make_compute(model, torch.device(device), numerics, cuda_graphs)
    normalization = Normalization((0.5,) * channels, (0.25,) * channels)
    host = ClientHost(compute, Images(pool, pool[:tested], np.arange(tested) % classes, normalization))
    settings = Distillation(scale, 0.1, 1, 256, 0.5, "real", True, 1)
    host.assign_clients(model, 0, [Shard(0, np.arange(len(labels)), labels)], settings)
    client = host._clients[0]
    own = client.synthetic
    assert own is not None
    own = replace(own, images=own.images.to(dtype), velocity=own.velocity.to(dtype))
    host._clients[0] = replace(client, synthetic=own)
    params = model.init(torch.Generator().manual_seed(1), dtype)
    request = UnlearningRequest("class-9", ForgetSet(classes=frozenset({classes - 1})), NOTHING)
    stage = Stage(1, steps, batch, 0.01, 1.0)
    return World(host, params, stage, settings, request, tested, len(labels), RoundContext(0, "", "train", 1))


def works(w: World, max_loss: float = 1e9) -> dict[str, Callable[[], Any]]:
    """Every client step of every method, evaluation and what attacks see, as a host does them."""
    real, forget = View("real"), View("real", only=w.request.forget)
    own, retain = View("synthetic", only=w.request.forget), View("augmented", without=w.request.forgotten)
    stage, batch = w.stage, w.stage.batch_size

    def step(client_step: Callable[..., Any], **settings: Any) -> Callable[[], Any]:
        return lambda: w.host.step(w.params, partial(client_step, **settings), 0, w.ctx)

    ascend = partial(step, local_sgd.run, stage=stage, ascend=True, max_loss=max_loss)
    return {
        "FedAvg": step(local_sgd.run, stage=stage, view=real),
        "FedProx": step(local_sgd.run, stage=replace(stage, proximal=0.1), view=real),
        "training with matching": step(quickdrop.train, stage=stage, distillation=w.settings),
        "ascent, synthetic": ascend(view=own),
        "ascent, real": ascend(view=forget),
        "bounded loss": step(local_sgd.run, stage=stage, view=forget, objective=sga.bounded_loss),
        "reflected": step(sga.reflect, stage=stage, view=forget),
        "recovery, augmented": step(local_sgd.run, stage=stage, view=retain),
        "FedEraser": step(federaser.calibrate, stage=stage, view=real, interval=1),
        "FU-MP, recovery": step(fump.recover_step, stage=stage, view=real),
        "FU-MP, statistics": step(fump.statistics, batch_size=batch, view=forget, hook="activation"),
        "FU-MP, convolutions": step(fump.statistics, batch_size=batch, view=forget, hook="convolution"),
        "fine-tuning": step(distillation.finetune, distillation=w.settings, batch_size=batch),
        "test": lambda: w.host.test_counts(w.params, 0, w.tested),
        "own data": lambda: w.host.client_counts(w.params, None, w.request),
        "attack, test": lambda: w.host.test_features(w.params, np.arange(0, w.tested, 2)),
        "attack, own data": lambda: w.host.client_features(w.params, 0, np.arange(min(100, w.owned))),
    }


STEPS = (
    "FedAvg",
    "FedProx",
    "training with matching",
    "ascent, synthetic",
    "ascent, real",
    "bounded loss",
    "reflected",
    "recovery, augmented",
    "FedEraser",
    "FU-MP, recovery",
)
"""Those that take T steps."""


def counted(name: str, **shape: Any) -> Tally:
    """Count one of :func:`works` on a device that is not there."""
    with pretended(Shapes()) as watch:
        w = world("cuda:0", **shape)
        work = works(w)[name]
        watch.begin()
        work()
        return watch.tally


def of_steps(name: str, **shape: Any) -> tuple[Tally, Tally]:
    """Count one more step, beside all else of a call: what T + 1 steps ask for beyond T."""
    one, two = (counted(name, steps=steps, **shape) for steps in (1, 2))
    return two - one, one - (two - one)


def of_finetuning(**shape: Any) -> tuple[Tally, Tally]:
    """Count one more matching step with what it trains before; and all else of a call."""
    made = []
    for steps in (2, 3):
        with mock.patch.multiple(distillation, FINETUNE_STEPS=steps, FINETUNE_EPOCHS=1):
            made.append(counted("fine-tuning", **shape))
    return made[1] - made[0], made[0]


def bare(width: int = WIDTH, batch: int = BATCH) -> Tally:
    """Count a local step as anybody would write it: autograd, ``foreach``, its batch on the device already."""
    with pretended(Shapes()) as watch:
        params = {n: t.to(CUDA) for n, t in ConvNet(3, 32, CLASSES, width).init(torch.Generator()).items()}
        leaves = {n: t.requires_grad_() for n, t in params.items()}
        images, labels = torch.empty(batch, 3, 32, 32, device=CUDA), torch.zeros(batch, dtype=torch.int64, device=CUDA)
        watch.begin()
        with torch.enable_grad():
            x: Tensor = images
            for block in range(3):
                x = F.conv2d(x, leaves[f"conv{block}.weight"], leaves[f"conv{block}.bias"], padding=1)
                affine = leaves[f"norm{block}.weight"], leaves[f"norm{block}.bias"]
                x = F.avg_pool2d(F.relu(F.instance_norm(x, None, None, *affine, eps=NORM_EPS)), 2)
            logits = F.linear(x.flatten(1), leaves["linear.weight"], leaves["linear.bias"])
            loss = F.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad():
            torch._foreach_add_(list(leaves.values()), gradients, alpha=-0.01)
        return watch.tally


def figures(tally: Tally) -> dict[str, float]:
    """Return what is shown of a count."""
    values = (
        tally.launches,
        tally.syncs.total(),
        tally.uploads,
        tally.moved_bytes / 1e9,
        tally.flops / 1e9,
        tally.peak_bytes / 1e6,
        tally.atomics,
    )
    return dict(zip(UNITS, values, strict=True))


def estimate_ms(tally: Tally, gpu: GpuModel, precision: str = "float32") -> float:
    """Return how long the device would take, operation by operation: an estimate, not a measurement.

    ``precision`` as in a job. What is counted says itself which operations are done in bfloat16.
    """
    total_s = 0.0
    for (kind, flops, moved, launches), times in tally.work.items():
        tensor = gpu.tf32_tflops if precision == "tf32" else 0.0
        if kind.endswith("half"):
            tensor = gpu.bfloat16_tflops
        peak = max(gpu.tflops * SUSTAINED, tensor * SUSTAINED_TENSOR)
        parts = (flops / (peak * 1e12), moved / (gpu.bandwidth_gb_s * SUSTAINED_GBS * 1e9), launches * KERNEL_S)
        total_s += times * max(parts)
    return 1e3 * total_s


def measure() -> Found:
    """Count all steps at the paper's shapes; a ceiling is an aim."""
    tallies: dict[tuple[str, str], Tally] = {(BARE, MORE): bare()}
    for name in STEPS:
        tallies[name, MORE], tallies[name, FIRST] = of_steps(name)
    tallies["fine-tuning", MORE], tallies["fine-tuning", FIRST] = of_finetuning()
    for name in ("FU-MP, statistics", "FU-MP, convolutions", "own data", "attack, own data"):
        tallies[name, FIRST] = counted(name)
    for name, shown in (("test", "test of 10,000 images"), ("attack, test", "attack on 5,000 images")):
        tallies[shown, FIRST] = counted(name, tested=TESTED)
    measured, ratios = [], []
    for (name, which), tally in tallies.items():
        found = figures(tally)
        side, case = ("bare PyTorch" if name == BARE else "qdsim"), f"{name}: {which}"
        measured += [Measured(NAME, case, side, quantity, found[quantity], unit) for quantity, unit in UNITS.items()]
        estimates = {name: estimate_ms(tally, gpu) for name, gpu in GPUS.items()}
        measured += [Measured(NAME, case, side, f"{gpu}, ms", ms, "ms") for gpu, ms in estimates.items()]
        whole = name == "fine-tuning" or (name, MORE) not in tallies
        if whole == (which == FIRST):
            for quantity, most in CEILINGS.get(name, {}).items():
                ratios.append(Ratio(NAME, CASE, f"{name}: {quantity}", found[quantity], most, False, UNITS[quantity]))
    more = [tally for (name, which), tally in tallies.items() if which == MORE]
    syncs = max(tally.syncs.total() for tally in more)
    whole_calls = ("fine-tuning", "FU-MP, statistics", "FU-MP, convolutions")
    calls = [tallies[name, FIRST] for name in (*STEPS, *whole_calls)]
    ratios += [
        Ratio(NAME, CASE, "syncs in one more step of any kind", syncs, 0, False, ""),
        Ratio(NAME, CASE, "syncs of a client step", max(t.syncs.total() for t in calls), MOST_SYNCS, False, ""),
        Ratio(NAME, CASE, "float atomics anywhere", sum(t.atomics for t in tallies.values()), 0, False, ""),
    ]
    return Found(measured, ratios)
