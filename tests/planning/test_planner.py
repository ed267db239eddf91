"""What ``qdsim plan`` says before anything runs."""

import subprocess
import sys

import numpy as np
import pytest

from qdsim.data import datasets
from qdsim.errors import BadInput, CannotPlace
from qdsim.experiment import config, plan
from qdsim.experiment.sections import Cluster
from qdsim.planning import estimate, planner, probe
from qdsim.planning.estimate import Costs
from qdsim.planning.layout import Layout
from tests.conftest import PROJECT

COSTS = Costs(gradient_s=1e-3, learning_s=2e-3, matching_s=4e-3, evaluation_s=1e-4)
SMALL = {
    "name": "small",
    "seeds": [0],
    "methods": ["quickdrop", "retrain", "fump"],
    "model": {"width": 4, "depth": 2},
    "partition": {"kind": "iid", "clients": 4},
    "train": {"rounds": 3, "steps": 2, "batch_size": 16},
    "synthetic": {"scale": 10},
    "unlearn": {"rounds": 1, "steps": 2},
    "recover": {"rounds": 1, "steps": 2, "batch_size": 16},
    "relearn": {"rounds": 0},
}


@pytest.fixture(scope="module")
def small():
    """1,437 images over four equal clients; 40 synthetic images or so each."""
    return plan.build_plan(config.validate(SMALL), datasets.load("digits", ""))


def test_a_rounds_time_is_that_of_its_busiest_actor(small):
    """A training step: 16 samples × 2 ms and S_i images × 4 ms, twice. Three clients in one actor wait for each other.

    Two lanes would need half of all four; the actor of three takes three. To that the test set, 360 × 0.1 ms on two
    lanes, and what a round costs beside.
    """
    point, at = next(small.federations())
    synthetic = at.partition.synthetic_counts(10).sum(1)
    by_hand = 2 * (16 * 2e-3 + synthetic * 4e-3)
    train = point.training()[0]
    assert estimate.client_seconds(plan.training_task(point, at), train, COSTS) == pytest.approx(by_hand)
    times = estimate.phase_times(small, Layout(((0, 1, 2), (3,)), 0.0, 1.0), 2, COSTS)
    assert times[0].wall_s == pytest.approx(3 * (by_hand[:3].sum() + 360 * 1e-4 / 2 + estimate.ROUND_S))
    assert (times[0].phase, times[0].rounds, times[0].waves) == ("train", 3, 2)


def test_every_phase_of_every_method_has_its_time(small):
    """Retraining: 16 samples × 1 ms × 2 steps; FU-MP looks at each of a client's samples once; the end of a request's
    phase costs a look at all training data."""
    _, at = next(small.federations())
    times = estimate.phase_times(small, Layout(((0,), (1,), (2,), (3,)), 0.0, 1.0), 4, COSTS)
    named = {(time.method, time.phase): time for time in times}
    assert set(named) == {
        ("shared", "train"),
        ("quickdrop", "unlearn"),
        ("quickdrop", "recover"),
        ("retrain", "unlearn"),
        ("fump", "unlearn"),
        ("fump", "recover"),
    }
    around_s = 360 * 1e-4 / 4 + estimate.ROUND_S
    ends_s = 1437 * 1e-4 / 4
    assert named["retrain", "unlearn"].wall_s == pytest.approx(3 * (2 * 16e-3 + around_s) + ends_s)
    largest = max(len(labels) for labels in at.labels)
    assert named["fump", "unlearn"].wall_s == pytest.approx(largest * 1e-4 + around_s + ends_s, rel=0.01)
    assert estimate.total_s(times) == estimate.START_S + sum(time.wall_s for time in times)


def test_of_few_participants_each_takes_its_own_time(small):
    """A quarter of four clients is one: a round lasts as long as the longest step, however many lanes there are."""
    job = config.validate(SMALL | {"train": SMALL["train"] | {"participation": 0.25}})
    made = plan.build_plan(job, datasets.load("digits", ""))
    point, at = next(made.federations())
    longest = estimate.client_seconds(plan.training_task(point, at), point.training()[0], COSTS).max()
    time = estimate.phase_times(made, Layout(((0,), (1,), (2,), (3,)), 0.0, 1.0), 4, COSTS)[0]
    assert time.wall_s == pytest.approx(3 * (longest + 360 * 1e-4 / 4 + estimate.ROUND_S))
    assert time.waves == 1


def test_a_cell_with_a_wider_network_takes_longer():
    """In proportion to its operations; the costs are those of the first point."""
    made = plan.build_plan(config.validate(SMALL | {"sweep": {"model.width": [4, 16]}}), datasets.load("digits", ""))
    first, second = (time for time in estimate.phase_times(made, Layout(((0, 1, 2, 3),), 0.0, 1.0), 1, COSTS)[:2])
    ratio = made.points[1].model.forward_flops / made.points[0].model.forward_flops
    assert (second.wall_s - 3 * estimate.ROUND_S) / (first.wall_s - 3 * estimate.ROUND_S) == pytest.approx(ratio)


def test_fine_tuning_is_fifty_matchings_and_the_descents_between_them():
    """F = 1: 50 × (Σ_c min(n_c, 16) × 2 ms + S × 4 ms) + 49 × 10 epochs × S × 1 ms."""
    job = config.validate(SMALL | {"synthetic": {"scale": 10, "finetune": 1}})
    made = plan.build_plan(job, datasets.load("digits", ""))
    point, at = next(made.federations())
    phase = point.training()[1]
    real = np.minimum(at.partition.counts, phase.stage.batch_size).sum(1)
    synthetic = at.partition.synthetic_counts(10).sum(1)
    by_hand = 50 * (real * 2e-3 + synthetic * 4e-3) + 49 * 10 * synthetic * 1e-3
    assert estimate.client_seconds(plan.training_task(point, at), phase, COSTS) == pytest.approx(by_hand)


def test_a_probe_measures_every_cost(small):
    """All are positive; a matched image, differentiated twice, costs more than a look at one."""
    costs = probe.measure(probe.probe_client(small))
    assert min(costs.gradient_s, costs.learning_s, costs.matching_s, costs.evaluation_s) > 0
    assert costs.matching_s > costs.evaluation_s


def test_operations_of_a_forward_pass():
    """W = 4, two blocks, 8×8, one channel: 2·9·(1·4·64 + 4·4·16) + 2·10·4·4 = 9,536."""
    from qdsim.models.convnet import ConvNet

    assert ConvNet(1, 8, 10, 4, 2).forward_flops == 9536


def test_data_that_are_not_here_are_planned_with_in_their_known_shape(tmp_path):
    """SVHN's 73,257 images: enough to say who sits where. A folder of images has no known shape: refused."""
    job = config.validate({"name": "x", "data": {"dataset": "svhn", "root": str(tmp_path)}})
    found = planner.plan_job(job, planner.imagined(2, "24GB", None, None), lambda *_: COSTS)
    assert found.notes == ["svhn is not here: planned with classes of equal size"]
    assert found.plan.points[0].federations[0].partition.counts.sum() == 73_257
    assert (found.gpus, found.lanes, found.layout.gpus) == (2, 2, 0.2)
    with pytest.raises(BadInput):
        planner.plan_job(
            config.validate({"name": "x", "data": {"dataset": f"folder:{tmp_path}"}}),
            planner.this_machine(),
            lambda *_: COSTS,
        )


def test_a_gpus_memory_counts_and_the_advice_fits(tmp_path):
    """13 × 256 × 0.688 MB of feature maps, six models of 1.3 MB and CUDA's 0.42 GB: 2.7 GB, two in 8 GB, not fifty."""
    settings = {"name": "x", "data": {"dataset": "cifar10", "root": str(tmp_path)}, "partition": {"clients": 50}}
    machines = planner.imagined(1, "8GB", None, None)
    with pytest.raises(CannotPlace, match=r"50 actors of 2\.7 GB on a GPU, found 8\.0 GB there, which hold 2") as no:
        planner.plan_job(config.validate(settings), machines, lambda *_: COSTS)
    assert no.value.fix == "set cluster.gpus_per_client to 0.5 and cluster.clients_per_actor to 25"
    cluster = {"gpus_per_client": 0.5, "clients_per_actor": 25}
    assert planner.plan_job(config.validate(settings | {"cluster": cluster}), machines, lambda *_: COSTS).times


@pytest.mark.parametrize(("text", "value"), [("24GB", 24e9), ("500 MB", 5e8), ("1.5TiB", 1.5 * 2**40), ("7", 7.0)])
def test_sizes(text, value):
    """Decimal and binary units."""
    assert planner.size_bytes("--memory", text) == value


def test_wrong_sizes():
    """One line with an example."""
    with pytest.raises(BadInput, match="write a size such as 24GB"):
        planner.size_bytes("--gpu-memory", "many")


@pytest.mark.slow
def test_the_command_prints_a_plan(tmp_path):
    """On this machine, measured by a probe; and for GPUs that it does not have, assumed, which it says."""

    def qdsim_plan(*options):
        command = [sys.executable, "-m", "qdsim", "plan", str(PROJECT / "jobs" / "quickstart.toml"), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    here = qdsim_plan()
    assert here.returncode == 0, here.stderr
    assert "it fits: 2 actors of" in here.stdout
    assert "retrain     unlearn" in here.stdout
    there = qdsim_plan("--gpus", "4", "--gpu-memory", "24GB")
    assert "assumed, not measured: 5 TFLOP/s" in there.stdout
    assert "2 actors of 1 GPU" in there.stdout
    narrow = qdsim_plan("--gpus", "1", "--set", "cluster.gpus_per_client=0.8")
    assert narrow.returncode == 3
    assert "actors that fit" in narrow.stderr
    assert "set cluster.clients_per_actor to 10" in narrow.stderr


@pytest.mark.ray
def test_gpus_that_are_only_logical_tell_of_no_memory(cluster_address):
    """The shared cluster has two of them: each node is asked, none knows of any memory, so none is checked."""
    from qdsim.ray_engine import cluster, probe

    with cluster.connected(Cluster(), cluster_address):
        assert sum(node.gpus for node in cluster.nodes()) == 2
        assert probe.gpu_memory() is None
