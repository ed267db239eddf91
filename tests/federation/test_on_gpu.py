"""The way that a GPU goes gives the CPU's numbers, on a device that is only claimed."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from qdsim.algorithms import distillation, quickdrop
from qdsim.bench import gpu_counts
from qdsim.bench.fake_cuda import CUDA, Values, pretended
from qdsim.models import params as P
from qdsim.models.module import ModuleModel

SMALL = {
    **{"width": 4, "batch": 24, "steps": 3, "per_class": 10, "size": 16, "classes": 4, "scale": 3, "tested": 130},
    "dtype": torch.float64,
}


def numbers(result):
    """All that came of a piece of work, as arrays."""
    if hasattr(result, "delta"):
        scalars = np.array([result.loss, result.first_loss or 0.0, result.samples, result.gradients])
        return [*P.to_numpy(result.delta).values(), scalars]
    if isinstance(result, tuple):
        return [counts.correct for counts in result]
    return [result.correct if hasattr(result, "correct") else result]


def done(device, only=None, max_loss=1e9, lr=0.01, change=lambda client: client, prepare=lambda w: None, **shape):
    """Each of the works, or those that are named, with the synthetic set after it."""
    with pretended(Values()) if device != "cpu" else contextlib.nullcontext():
        w = gpu_counts.world(device, **(SMALL | shape))
        w.stage = replace(w.stage, lr=lr)
        prepare(w)
        before = change(w.host._clients[0])
        found = {}
        works = gpu_counts.works(w, max_loss)
        for name in only or works:
            w.host._clients[0] = before
            arrays = numbers(works[name]())
            own = w.host._clients[0].synthetic
            found[name] = [*arrays, own.images.numpy(), own.velocity.numpy()]
        return found


def largest_difference(one, other):
    """Relative to the largest number of each array."""
    apart = [np.abs(a - b).max() / max(np.abs(a).max(), 1e-30) for a, b in zip(one, other, strict=True) if a.size]
    return float(max(apart))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"micro_batch": 5},
        {"channels": 1, "size": 28, "batch": 7},
        {"depth": 1, "size": 9},
        {"model": ModuleModel("resnet", 3, 16, 4, '{"width": 4}')},
    ],
    ids=["whole", "in pieces", "28x28", "one block, odd", "resnet"],
)
def test_every_work_gives_the_same_numbers(shape, monkeypatch):
    """Client steps, evaluation, attacks: float64, 1e-9."""
    monkeypatch.setattr(distillation, "FINETUNE_STEPS", 2)
    monkeypatch.setattr(distillation, "FINETUNE_EPOCHS", 2)
    expected, found = done("cpu", **shape), done("cuda:0", **shape)
    for name, arrays in expected.items():
        assert largest_difference(arrays, found[name]) < 1e-9, name


def rare(client):
    """Its last class has two samples, so it is missing from batches now and then."""
    kept = np.flatnonzero((client.labels < 3) | (np.arange(len(client.labels)) >= len(client.labels) - 2))
    own = distillation.initial_set(
        replace(client, indices=client.indices[kept], labels=client.labels[kept], synthetic=None),
        quickdrop.Distillation(3, 0.1, 2, 5, 0.5, "real", True, 1),
        torch.Generator().manual_seed(0),
        torch.float64,
    )
    return replace(client, indices=client.indices[kept], labels=client.labels[kept], synthetic=own)


def test_classes_may_be_missing_from_a_batch():
    """Batches of six of 32 samples, of which two are of the last class; 10 steps."""
    name = "training with matching"
    expected, found = (done(device, [name], batch=6, steps=10, change=rare)[name] for device in ("cpu", "cuda:0"))
    assert largest_difference(expected, found) < 1e-9


def test_an_ascent_stops_where_it_does_on_the_cpu():
    """Five steps of ascent with a high learning rate: the CPU stops in between, a GPU's later steps change nothing."""
    shape = {"steps": 5, "lr": 0.1, "max_loss": 2.0}
    name = "ascent, real"
    expected, found = (done(device, [name], **shape)[name] for device in ("cpu", "cuda:0"))
    assert 1 < expected[-3][3] < 5
    assert expected[-3].tolist()[2:] == found[-3].tolist()[2:]
    assert largest_difference(expected, found) < 1e-9


def test_tensors_of_a_type_move_as_one():
    """Three tensors of two types there and back: two copies each way, shapes and values as before."""
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7), torch.tensor(8.0)]
    with pretended(Values()) as watch:
        there = P.move(tensors, CUDA)
        assert all(tensor.device == CUDA for tensor in there)
        back = P.move(there, torch.device("cpu"))
        assert P.move(back, torch.device("cpu"))[0] is back[0]
    assert watch.tally.syncs == {"upload": 2, "download": 2}
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))


def test_a_shard_goes_to_the_gpu_once():
    """The second round of a client copies no images: one upload fewer."""
    uploads = []
    with pretended(Values()) as watch:
        w = gpu_counts.world("cuda:0", **SMALL)
        for _ in range(2):
            watch.begin()
            gpu_counts.works(w)["training with matching"]()
            uploads.append(watch.tally.uploads)
    assert uploads[0] == uploads[1] + 1


REPEATED = ("FedAvg", "FedProx", "training with matching", "ascent, real", "recovery, augmented", "FU-MP, recovery")


@pytest.mark.parametrize("name", REPEATED)
def test_every_step_does_the_same_whatever_it_drew(name):
    """Rounds 1 and 2 draw other batches of 6; matching's lack a class that is rare. Operations and shapes are equal.

    Nothing is written at indices, which would be sorted first.
    """
    logs, drawn = [], []
    for number in (1, 2):
        with pretended(Values()) as watch:
            w = gpu_counts.world("cuda:0", **(SMALL | {"batch": 6, "steps": 6}))
            if name == "training with matching":
                w.host._clients[0] = rare(w.host._clients[0])
            w.ctx = replace(w.ctx, round_number=number)
            watch.begin()
            update = gpu_counts.works(w)[name]()
            logs.append(watch.tally.log)
            drawn.append(update.loss)
    assert drawn[0] != drawn[1]
    assert logs[0] == logs[1]
    assert not [operation for operation, _ in logs[0] if "put" in operation or "scatter" in operation]


def test_more_synthetic_images_than_a_step_takes():
    """Of 12 images four a step, drawn anew: those of absent classes among them stay; the CPU's numbers to 1e-9."""
    name = "training with matching"

    def fewer(w):
        w.settings = replace(w.settings, batch=4)

    shape = {"batch": 6, "steps": 10, "change": rare, "prepare": fewer}
    expected, found = (done(device, [name], **shape)[name] for device in ("cpu", "cuda:0"))
    assert largest_difference(expected, found) < 1e-9


@pytest.mark.parametrize("name", [*REPEATED, "fine-tuning"])
def test_graphs_give_the_same_bits(name, monkeypatch):
    """Ten steps: two as they are, then the operations of the third on its memory, eight times; a class is rare.

    What a step would keep in a number of the host, or ask the device for, would come out wrong, or raise.
    """
    monkeypatch.setattr(distillation, "FINETUNE_STEPS", 8)
    monkeypatch.setattr(distillation, "FINETUNE_EPOCHS", 1)
    shape = {"batch": 6, "steps": 10, "change": rare, "max_loss": 1.5}
    plain, replayed = (done("cuda:0", [name], **shape, cuda_graphs=wanted)[name] for wanted in ("off", "on"))
    for one, other in zip(plain, replayed, strict=True):
        assert np.array_equal(one, other)


def test_a_graph_saves_launches_and_waits_for_its_capture_alone():
    """Ten steps of matching: two captures, a wait each; 222 launches a step become the copies of what differs."""
    tallies = []
    for wanted in ("off", "on"):
        with pretended(Values()) as watch:
            w = gpu_counts.world("cuda:0", **(SMALL | {"steps": 10}), cuda_graphs=wanted)
            watch.begin()
            gpu_counts.works(w)["training with matching"]()
            tallies.append(watch.tally)
    plain, replayed = tallies
    assert replayed.syncs["synchronize"] == plain.syncs["synchronize"] + 2
    assert replayed.launches < plain.launches / 3


@pytest.mark.parametrize(("micro_batch", "batches"), [("auto", 3), (32, 23)])
def test_an_evaluation_takes_a_thousand_images_at_once(micro_batch, batches):
    """2,300 images: three batches on a GPU, of a hundred where micro-batches are small; the answers are the CPU's."""
    shape = {"tested": 2300, "micro_batch": micro_batch, "depth": 2}
    names = ["test", "attack, test"]
    expected, found = (done(device, names, **shape) for device in ("cpu", "cuda:0"))
    for name in names:
        assert largest_difference(expected[name], found[name]) < 1e-9
    with pretended(Values()) as watch:
        w = gpu_counts.world("cuda:0", **(SMALL | shape))
        watch.begin()
        gpu_counts.works(w)["test"]()
    assert sum("convolution" in operation for operation, _ in watch.tally.log) == 2 * batches
