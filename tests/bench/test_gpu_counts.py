"""What client steps ask of a GPU stays below its ceilings, on a device that does not exist."""

import pytest
import torch

from qdsim.bench import gpu_counts
from qdsim.bench.fake_cuda import CUDA, Shapes, Values, gradient, pretended
from qdsim.data import datasets
from qdsim.data.clients import Samples
from qdsim.experiment import config, plan
from qdsim.models.device import CONTEXT_BYTES
from qdsim.models.module import ModuleModel
from qdsim.planning import estimate

SMALL = {"width": 8, "batch": 32, "per_class": 20, "scale": 10}
"""Counts of launches, syncs and copies do not depend on the width."""
BIG = {"per_class": 60, "scale": 10}
"""The width and the batch of the paper, with 60 synthetic images, of fewer real ones."""


def test_bare_pytorch_is_counted_as_it_is_known():
    """54 launches and 2.9 GB at W=128 with batches of 256, by hand: 18 operations forwards with three biases, ..."""
    tally = gpu_counts.bare()
    assert tally.launches == 54
    assert tally.moved_bytes == pytest.approx(2.88e9, rel=0.01)
    assert tally.syncs.total() == 0


def test_waiting_and_copies_are_counted():
    """Up and down wait once each; so does one number; a boolean index asks how many there are; index_add is atomic."""
    with pretended(Values()) as watch:
        x = torch.arange(6.0).view(2, 3).to(CUDA)
        total = float((x @ x.t()).sum())
        chosen = x[x > 1].cpu()
        torch.zeros(2, device=CUDA).index_add_(0, torch.zeros(2, dtype=torch.int64, device=CUDA), x[:, 0])
    assert (total, chosen.tolist()) == (0 + 1 + 4 + 2 * (4 + 10) + 9 + 16 + 25, [2, 3, 4, 5])
    assert watch.tally.syncs == {"upload": 1, "one number": 1, "nonzero": 1, "download": 1}
    assert (watch.tally.uploads, watch.tally.atomics) == (1, 1)
    assert watch.tally.flops == 2 * 2 * 2 * 3


def test_the_engine_that_needs_no_device_is_autograds():
    """A gradient of a gradient, through a broadcast and a branch; a leaf that is not reached gets zeros."""
    draws = torch.Generator().manual_seed(0)
    a, b, unused = (torch.randn(shape, generator=draws).requires_grad_() for shape in ((3, 4), (4,), (2,)))

    def both(grad):
        y = torch.tanh(a @ b[:, None] + b[0]).relu().square().sum()
        first = grad(y, [a, b], create_graph=True)
        return grad(sum(g.square().sum() for g in first), [a, b, unused], materialize_grads=True)

    torch.testing.assert_close(both(gradient), both(torch.autograd.grad))


@pytest.mark.parametrize("device", [Shapes(), Values()], ids=["shapes", "values"])
def test_what_lies_on_the_wrong_device_is_refused(device, monkeypatch):
    """Labels that stay on the host meet logits on the GPU."""
    batches = Samples.batches

    def left_behind(self, *given):
        return ((images, labels.cpu()) for images, labels in batches(self, *given))

    monkeypatch.setattr(Samples, "batches", left_behind)
    with pretended(device), pytest.raises(RuntimeError, match=r"device"):
        gpu_counts.works(gpu_counts.world("cuda:0", **SMALL))["FedAvg"]()


@pytest.mark.parametrize("name", gpu_counts.STEPS)
def test_one_more_step_waits_for_nothing(name):
    """No sync, no copy, no float atomics in it; at most eight syncs in all else of a call."""
    more, rest = gpu_counts.of_steps(name, **SMALL)
    assert more.syncs.total() == more.uploads == more.atomics == 0
    assert 0 < rest.syncs.total() <= gpu_counts.MOST_SYNCS
    assert rest.atomics == 0
    assert more.launches <= gpu_counts.CEILINGS.get(name, {}).get("launches", 70)


def test_so_does_a_step_of_fine_tuning():
    """Two steps against three, each with a pass over the synthetic images between them."""
    more, whole = gpu_counts.of_finetuning(**SMALL)
    assert more.syncs.total() == more.uploads == more.atomics == 0
    assert 0 < whole.syncs.total() <= gpu_counts.MOST_SYNCS


@pytest.mark.parametrize("kind", ["resnet", "lenet", "mlp"])
@pytest.mark.parametrize("name", ["training with matching", "ascent, synthetic"])
def test_other_networks_wait_for_nothing_either(kind, name):
    """By autograd, class by class: more launches, no syncs."""
    shape = {"width": 8, "batch": 8, "per_class": 8, "classes": 3, "scale": 4, "size": 16}
    more, rest = gpu_counts.of_steps(name, **shape, model=ModuleModel(kind, 3, 16, 3))
    assert more.syncs.total() == more.uploads == more.atomics == rest.atomics == 0
    assert rest.syncs.total() <= gpu_counts.MOST_SYNCS


@pytest.mark.parametrize("name", ["FedAvg", "training with matching"])
def test_bytes_and_launches_of_a_step(name):
    """At the paper's shapes; the ceilings are in the benchmark."""
    more, _ = gpu_counts.of_steps(name, **BIG)
    found = gpu_counts.figures(more)
    for quantity, most in gpu_counts.CEILINGS[name].items():
        assert 0 < found[quantity] <= most, quantity


@pytest.mark.parametrize("batch", [16, 256])
def test_memory_is_within_what_is_planned(batch):
    """Ten clients of CIFAR-10's shape with 500 images of each class: fine-tuning, matching and a test of 10,000 images.

    Fine-tuning has a batch of each of ten classes, cut into pieces of 256, also where a batch is of 16.
    """
    stages = {name: {"batch_size": batch} for name in ("train", "unlearn", "recover", "relearn")}
    job = {"name": "x", "data": {"dataset": "cifar10"}, "partition": {"kind": "iid"}, "synthetic": {"finetune": 1}}
    planned = plan.build_plan(config.validate(job | stages), datasets.stand_in("cifar10"))
    expected = estimate.gpu_bytes(planned, 1) - CONTEXT_BYTES
    _, whole = gpu_counts.of_finetuning(per_class=500, batch=batch)
    if batch == 256:
        assert 0.5e9 < whole.peak_bytes <= 2e9
    assert whole.peak_bytes <= expected
    for name in ("training with matching", "recovery, augmented", "test"):
        assert gpu_counts.counted(name, per_class=500, batch=batch, tested=10_000).peak_bytes <= expected, name


@pytest.mark.parametrize("name", ["FU-MP, statistics", "FU-MP, convolutions"])
def test_statistics_wait_a_few_times_in_all(name):
    """However many pieces the client's samples are cut into: 200 in seven, and in two hundred."""
    for micro_batch in (32, 1):
        tally = gpu_counts.counted(name, **SMALL, micro_batch=micro_batch)
        assert 0 < tally.syncs.total() <= gpu_counts.MOST_SYNCS
        assert tally.atomics == 0


def test_writing_at_indices_is_counted_as_the_sort_that_it_is():
    """Deterministic: eleven launches, for index_add and scatter as well; a number at booleans is filled in by one."""
    with pretended(Values()) as watch:
        x, rows = torch.zeros(4, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA)
        ones = torch.ones(2, device=CUDA)
        for work, launches in (
            (lambda: x.__setitem__(rows, ones), 11),
            (lambda: x.index_add_(0, rows, ones), 11),
            (lambda: x.scatter_(0, rows, ones), 11),
            (lambda: x.masked_fill_(x > 0, 1.0), 2),
            (lambda: x.index_select(0, rows), 1),
        ):
            watch.begin()
            work()
            assert watch.tally.launches == launches


@pytest.mark.parametrize("name", ["test", "attack, test", "own data", "attack, own data"])
def test_an_evaluation_waits_a_few_times_in_all(name):
    """The model, the images and the answers are copied once each; own data are two halves."""
    tally = gpu_counts.counted(name, **SMALL, tested=1500)
    assert tally.syncs.total() <= 6
    assert tally.atomics == 0


def test_evaluation_copies_ten_thousand_images_at_once():
    """10,001 images take one copy more than 10,000."""
    tallies = [gpu_counts.counted("test", **SMALL, tested=tested) for tested in (10_000, 10_001)]
    assert [tally.syncs.total() for tally in tallies] == [3, 4]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [{}, {"channels": 1, "size": 28}, {"classes": 2}, {"depth": 1}, {"micro_batch": 7}])
def test_every_work_runs_on_a_gpu(precision, shape, monkeypatch):
    """No operation that a GPU refuses, in any precision and shape, in whole batches and in pieces."""
    monkeypatch.setattr("qdsim.algorithms.distillation.FINETUNE_STEPS", 2)
    monkeypatch.setattr("qdsim.algorithms.distillation.FINETUNE_EPOCHS", 1)
    with pretended(Shapes()):
        w = gpu_counts.world("cuda:0", **SMALL, **shape, precision=precision)
        for work in gpu_counts.works(w).values():
            work()


def test_estimates_are_the_longest_of_three():
    """1e12 FLOP of float32 at 60 % of 6.5 TFLOP/s are 256 ms on an RTX 2060; a gigabyte at 80 % of 336 GB/s 3.7 ms.

    An A100 takes them at 60 % of 19.5 TFLOP/s, with TF32 at 35 % of 156, and what is in bfloat16 at 35 % of 312.
    """
    tally = gpu_counts.Tally()
    rtx2060, a100 = gpu_counts.GPUS["RTX 2060"], gpu_counts.GPUS["A100"]
    tally.work["convolution", 10**12, 1000, 1] += 1
    assert gpu_counts.estimate_ms(tally, rtx2060) == pytest.approx(1e3 / (0.6 * 6.5))
    assert gpu_counts.estimate_ms(tally, rtx2060, "tf32") == pytest.approx(1e3 / (0.6 * 6.5))
    assert gpu_counts.estimate_ms(tally, a100) == pytest.approx(1e3 / (0.6 * 19.5))
    assert gpu_counts.estimate_ms(tally, a100, "tf32") == pytest.approx(1e3 / (0.35 * 156))
    tally.work["elementwise", 0, 10**9, 1] += 2
    assert gpu_counts.estimate_ms(tally, rtx2060) == pytest.approx(1e3 / (0.6 * 6.5) + 2e3 / (0.8 * 336))
    half = gpu_counts.Tally()
    half.work["product half", 10**12, 1000, 1] += 1
    assert gpu_counts.estimate_ms(half, a100, "bfloat16") == pytest.approx(1e3 / (0.35 * 312))
