"""On which devices a run computes: of one kind, or the job allows others; a granted GPU is used or refused."""

import json
import re

import pytest
import torch

from qdsim.data import datasets
from qdsim.errors import BadInput, OtherDevice, UnusableGpu
from qdsim.experiment import config
from qdsim.experiment import plan as plans
from qdsim.experiment.trained import check_same_training
from qdsim.models.device import DeviceInfo
from qdsim.ray_engine.client_actor import ActorPlace
from qdsim.ray_engine.reservation import release
from qdsim.ray_engine.worker_group import start_workers
from qdsim.ray_engine.workers import DevicesSeen, Workers
from qdsim.store.run_directory import read_manifest
from tests.runs import TINY, run

A100 = DeviceInfo("A100", "8.0", "2.9", "12.8", "91002", uuid="GPU-1")
SECOND = DeviceInfo("A100", "8.0", "2.9", "12.8", "91002", uuid="GPU-2")
V100 = DeviceInfo("V100", "7.0", "2.9", "12.8", "91002", uuid="GPU-3")
CPU = DeviceInfo("cpu")


def place(device, node="0123456789"):
    return ActorPlace(node, "0", device)


@pytest.mark.parametrize("other", [V100, CPU], ids=["another GPU", "the CPU"])
def test_an_actor_on_another_kind_of_device_is_refused(other):
    """Two cards of one model are one kind, each told of once; whoever replaces an actor must be of it as well."""
    told = []
    devices = DevicesSeen(mixed=False, notify=told.append)
    devices.take([place(A100), place(SECOND), place(A100)])
    assert told == [A100, SECOND]
    assert devices.fingerprint == A100.fingerprint
    with pytest.raises(OtherDevice) as caught:
        devices.take([place(other)])
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        f"other device, other bits: asked for {A100.fingerprint}, on which the run began, found {other.fingerprint} on "
        "node 01234567; set cluster.mixed_devices to true to allow it, or resume where there is the former"
    )


def test_a_job_may_allow_several_kinds():
    """All of them are then what its results depend on, in one order whichever came first."""
    told = []
    devices = DevicesSeen(mixed=True, notify=told.append)
    devices.take([place(V100), place(A100)])
    devices.take([place(V100)])
    assert told == [V100, A100]
    assert devices.fingerprint == f"{A100.fingerprint} + {V100.fingerprint}"


def test_a_training_resumes_on_the_device_that_it_began_on(tmp_path):
    """On another it is refused with the setting that allows it; then it is of both, and stays so on the first."""
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "training.json"
    assert check_same_training(file, {"seed": 0, "device": "A100"}) == "A100"
    with pytest.raises(BadInput, match=r"device \(then 'A100', now 'cpu'\).*or set cluster\.mixed_devices to true"):
        check_same_training(file, {"seed": 0, "device": "cpu"})
    assert check_same_training(file, {"seed": 0, "device": "cpu"}, mixed_devices=True) == "A100 + cpu"
    assert check_same_training(file, {"seed": 0, "device": "A100"}, mixed_devices=True) == "A100 + cpu"
    assert json.loads(file.read_text())["device"] == "A100 + cpu"
    with pytest.raises(BadInput, match=r"seed \(then 0, now 1\); run without --resume to start a new run$"):
        check_same_training(file, {"seed": 1, "device": "cpu"}, mixed_devices=True)


@pytest.mark.ray
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_actor_that_cannot_use_its_gpu_any_more_moves_to_another(cluster_address):
    """One of the two logical GPUs each time: it is refused there, moves once, is refused again, and says why."""
    import ray

    job = config.validate({**TINY, "cluster": {"clients_per_actor": 10, "cpu_fallback": True, "attempts": 2}})
    dataset = datasets.load("digits", "")
    plan = plans.build_plan(job, dataset)
    ray.init(address=cluster_address, namespace="devices")
    try:
        refs = [ray.put(array) for array in (dataset.train_images, dataset.test_images, dataset.test_labels)]
        group = start_workers(plan, "moves", refs, dataset.normalization, print)
        told = []
        workers = Workers(job.cluster, group, lambda event: told.append(getattr(event, "text", "")))
        told = [text for text in told if "instead of" in text]
        assert workers.places[0].gpu_id == "", "the CPU computes"
        (note,) = told
        said = (
            r"clients 0, 1, .+ 5 more run on the CPU instead of GPU (\d) of node \w+ \(cluster.cpu_fallback\): .*torch"
        )
        first = re.match(said, note)[1]
        group.cpu_fallback = False  # as if the driver had failed meanwhile
        with pytest.raises(UnusableGpu) as caught:
            workers.replace(0, "its actor was lost", lambda worker: None)
        assert {first, caught.value.asked.removeprefix("GPU ")} == {"0", "1"}
    finally:
        release("moves")
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_granted_gpu_that_cannot_be_used_ends_the_run(cluster_address, tmp_path):
    """The tests' cluster has GPUs by name only: exit 3 with torch's reason. Allowed, it is the CPU, in the manifest."""
    on_ray = {
        "engine": "ray",
        "address": cluster_address,
        "train": {"rounds": 1},
        "requests": [{"kind": "class", "target": 3}],
    }
    strict, allowed = ({"clients_per_actor": 5, "cpu_fallback": fallback} for fallback in (False, True))
    with pytest.raises(
        UnusableGpu, match=r"asked for GPU \d, found that torch cannot use it \(.+\); .*cluster\.cpu_fallback"
    ):
        run(tmp_path, cluster=strict, **on_ray)
    manifest = read_manifest(next(tmp_path.glob("tiny-*")))
    assert (manifest["state"], manifest["exit_code"]) == ("failed", 3)
    done = read_manifest(run(tmp_path / "allowed", cluster=allowed, **on_ray))
    assert done["devices"] == [{"model": "cpu"}]
    assert set(done["hardware"]) >= {"driver", "cuda", "cudnn", "gpus"}
