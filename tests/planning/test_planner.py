"""What ``qdsim plan`` says before anything runs."""

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from qdsim.api import plan_report
from qdsim.api.plan_report import JobPlan
from qdsim.data import datasets
from qdsim.errors import BadInput, CannotPlace, UnusableGpu
from qdsim.experiment import config, plan
from qdsim.experiment.sections import Cluster
from qdsim.experiment.work import Costs, client_seconds
from qdsim.planning import estimate, gpus, planner, probe, units
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
    assert client_seconds(plan.training_task(point, at), train, COSTS) == pytest.approx(by_hand)
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
    longest = client_seconds(plan.training_task(point, at), point.training()[0], COSTS).max()
    time = estimate.phase_times(made, Layout(((0,), (1,), (2,), (3,)), 0.0, 1.0), 4, COSTS)[0]
    assert time.wall_s == pytest.approx(3 * (longest + 360 * 1e-4 / 4 + estimate.ROUND_S))
    assert time.waves == 1


def test_a_cell_with_a_wider_network_takes_longer():
    """In proportion to its operations; the costs are those of the first point."""
    made = plan.build_plan(config.validate(SMALL | {"sweep": {"model.width": [4, 16]}}), datasets.load("digits", ""))
    times = estimate.phase_times(made, Layout(((0, 1, 2, 3),), 0.0, 1.0), 1, COSTS)
    first, second = (time for time in times if time.phase == "train")
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
    assert client_seconds(plan.training_task(point, at), phase, COSTS) == pytest.approx(by_hand)


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
    assert (found.gpus, found.layout.gpus) == (2, 0.2)
    with pytest.raises(BadInput):
        planner.plan_job(
            config.validate({"name": "x", "data": {"dataset": f"folder:{tmp_path}"}}),
            planner.this_machine(),
            lambda *_: COSTS,
        )


CIFAR = {"name": "x", "data": {"dataset": "cifar10", "root": "nowhere"}, "partition": {"clients": 50}}


def test_a_gpus_memory_counts_and_the_setting_that_fits_is_applied():
    """Two in 8 GB, not fifty: an actor of 25 clients takes 2.8 GB.

    13 × 256 × 0.688 MB of feature maps, six models of 1.3 MB, CUDA's 0.42 GB, and 25,000 images of 3,072 bytes.

    By default, and with ``auto``, 25 clients go into each of two actors, and the plan says so; a run lays out the same.
    """
    machines = planner.imagined(1, "8GB", None, None)
    for cluster in ({}, {"clients_per_actor": "auto"}):
        found = planner.plan_job(config.validate(CIFAR | {"cluster": cluster}), machines, lambda *_: COSTS)
        assert ([len(group) for group in found.layout.clients], found.layout.gpus) == ([25, 25], 0.5)
        assert any("25 clients share an actor (auto): a GPU of 8 GB holds 2 actors of 2.8 GB" in n for n in found.notes)
        assert estimate.layout_of(found.plan, machines.nodes, None, 8e9) == found.layout
    roomy = planner.plan_job(config.validate(CIFAR), planner.imagined(1, "200GB", None, None), lambda *_: COSTS)
    assert len(roomy.layout.clients) == 50
    assert not [note for note in roomy.notes if "share an actor" in note]


@pytest.mark.parametrize("cluster", [{"gpus_per_client": 0.02}, {"clients_per_actor": 2}])
def test_numbers_that_the_user_fixed_are_refused_with_some_that_fit(cluster):
    """Fifty actors on a GPU, or 25; the advice is then taken."""
    machines = planner.imagined(1, "8GB", None, None)
    with pytest.raises(CannotPlace, match=r"(50|25) actors of 2\.7 GB on a GPU, found 8 GB there, which hold 2") as no:
        planner.plan_job(config.validate(CIFAR | {"cluster": cluster}), machines, lambda *_: COSTS)
    assert no.value.fix == "set cluster.gpus_per_client to 0.5 and cluster.clients_per_actor to 25"
    advised = {"gpus_per_client": 0.5, "clients_per_actor": 25}
    assert planner.plan_job(config.validate(CIFAR | {"cluster": advised}), machines, lambda *_: COSTS).times


def test_both_ways_of_sharing_a_gpu_are_told():
    """Ten clients on an 80 GB GPU of an eight-core machine: ten processes, 0.42 GB of CUDA's own and 0.8 cores each.

    Or two with five clients in turn, 0.84 GB of CUDA's own and two cores. On a GPU of 8 GB the first is not possible.
    """
    job = config.validate(CIFAR | {"partition": {"clients": 10}})
    found = planner.plan_job(job, planner.imagined(1, "80GB", None, None), lambda *_: COSTS)
    one, packed = found.packings
    assert (one.name, one.clients, one.on_a_gpu, one.cores) == ("1 (this job)", 1, 10, 8.0)
    assert (packed.name, packed.clients, packed.on_a_gpu) == ('"auto"', 5, 2)
    assert (one.context_bytes, packed.context_bytes) == (10 * 400 * 2**20, 2 * 400 * 2**20)
    assert (packed.cores, packed.memory_bytes) == (2.0, 2 * estimate.gpu_bytes(found.plan, 5))
    text = repr(JobPlan(found, is_assumed=True))
    assert "without CUDA MPS kernels of different processes take turns" in text
    (only,) = planner.plan_job(job, planner.imagined(1, "8GB", None, None), lambda *_: COSTS).packings
    assert (only.name, only.on_a_gpu) == ('"auto" (this job)', 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_probe_on_a_gpu_that_cannot_be_used_says_so_as_a_run_does(small):
    """Exit 3 with torch's reason, in a line; where the job allows the CPU, that is measured."""
    layout = Layout(((0,), (1,), (2,), (3,)), 0.25, 1.0)
    with pytest.raises(UnusableGpu, match="asked for GPU 0, found that torch cannot use it"):
        planner.measured_here(layout, small)
    allowed = plan.build_plan(config.validate(SMALL | {"cluster": {"cpu_fallback": True}}), datasets.load("digits", ""))
    assert planner.measured_here(layout, allowed).gradient_s > 0


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 2060", "rtx2060"),
        ("NVIDIA GeForce RTX 2060 SUPER", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A30", None),
    ],
)
def test_gpus_by_the_drivers_names(driver, known):
    """The numbers of another chip are not taken for those of one with nearly its name."""
    assert gpus.named_by_driver(driver) is (gpus.MODELS[known] if known else None)


def test_a_gpu_that_holds_no_actor_at_all_is_refused():
    """2.7 GB in 2 GB: no packing helps, a smaller batch or network does."""
    with pytest.raises(CannotPlace) as no:
        planner.plan_job(config.validate(CIFAR), planner.imagined(1, "2GB", None, None), lambda *_: COSTS)
    assert no.value.fix == "set cluster.micro_batch lower, or take a smaller model.width"


def test_a_named_gpu_has_its_memory_and_its_speed():
    """A network of 101 MFLOP a pass: on an A100 its operations decide, on an L4 8 × 0.688 MB of maps at 300 GB/s.

    Halfway between an eighth and a half of a peak is a quarter of it.
    """
    machines = planner.imagined(1, None, None, None, "A100")
    assert machines.gpu_bytes == 40e9
    found = planner.plan_job(config.validate(CIFAR), machines, lambda *_: COSTS)
    network = found.plan.points[0].model
    for name, one_s in (
        ("a100", 4 * network.forward_flops / 19.5e12),
        ("l4", 4 * 8 * network.activation_bytes / 300e9),
    ):
        costs = planner.assumed(found.layout, found.plan, gpus.find(name))
        assert costs == Costs(*(pytest.approx(passes * one_s) for passes in (3, 3, 7, 1)))
    assert planner.imagined(1, "24GB", None, None, "a100").gpu_bytes == 24e9
    assert gpus.find("RTX 4090") is gpus.MODELS["rtx4090"]
    for name, known in {
        "A100-80GB": "a100-80",
        "Tesla T4": "t4",
        "GeForce RTX 3090": "rtx3090",
        "a100-40gb": "a100",
        "NVIDIA A100-SXM4-40GB": "a100",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100 80GB PCIe": "a100-80",
        "v100-16": "v100",
        "Tesla V100-SXM2-32GB": "v100-32",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
    }.items():
        assert gpus.find(name) is gpus.MODELS[known]
    for name in ("a100-24gb", "RTX 2060 SUPER", "A10G", "NVIDIA"):
        with pytest.raises(BadInput, match="known are rtx2060"):
            gpus.find(name)
    with pytest.raises(BadInput, match="--gpu = 'a9000': known are rtx2060, t4"):
        gpus.find("a9000")


def test_every_gpu_says_where_its_numbers_are_from():
    """The title of its maker's document; memory that a card has, and more operations than bytes."""
    for model in gpus.MODELS.values():
        assert re.search("datasheet|whitepaper|specifications", model.source)
        assert model.memory_gb in (6, 16, 24, 32, 40, 80)
        assert model.tflops * 1000 > model.bandwidth_gb_s


def test_a_range_holds_what_is_assumed(small):
    """Costs may be half or double, rounds and the start 30 % off: of a phase of c s and what 3 rounds cost beside."""
    layout = Layout(((0,), (1,), (2,), (3,)), 0.0, 1.0)
    within = estimate.Within((0.5, 2.0))
    times = estimate.phase_times(small, layout, 4, COSTS, within)
    steps_s = times[0].wall_s - 3 * estimate.ROUND_S
    assert times[0].low_s == pytest.approx(0.5 * steps_s + 3 * estimate.ROUND_S / 1.3)
    assert times[0].high_s == pytest.approx(2.0 * steps_s + 3 * estimate.ROUND_S * 1.3)
    low_s, high_s = estimate.range_s(times, within)
    assert low_s == pytest.approx(estimate.START_S / 1.3 + sum(time.low_s for time in times))
    assert low_s < estimate.total_s(times) < high_s
    assert (planner.ASSUMED.costs[0], planner.ASSUMED.costs[1]) == (0.5, 2.0)


@pytest.mark.parametrize(("share", "within"), [(0, estimate.MEASURED), ("auto", planner.ASSUMED)])
def test_what_is_measured_is_not_called_assumed(share, within, tmp_path):
    """On a machine with a GPU whose clients are kept on its cores, the costs are those of these cores."""
    job = config.validate(CIFAR | {"cluster": {"gpus_per_client": share, "clients_per_actor": 10}})
    found = planner.plan_job(job, planner.imagined(1, "80GB", None, None), lambda *_: COSTS, planner.ASSUMED)
    assert found.within == within


def test_only_of_cores_is_it_said_how_well_plans_did():
    """No measured run on a GPU is known."""
    for share, known in ((0, True), ("auto", False)):
        job = config.validate(CIFAR | {"cluster": {"gpus_per_client": share, "clients_per_actor": 10}})
        found = planner.plan_job(job, planner.imagined(1, "80GB", None, None), lambda *_: COSTS)
        said = repr(plan_report.JobPlan(found, is_assumed=False))
        assert "measured: a few steps of one client" in said
        assert ("runs on cores were within 30 %" in said) is known


@pytest.mark.parametrize(("text", "value"), [("24GB", 24e9), ("500 MB", 5e8), ("1.5TiB", 1.5 * 2**40), ("7 B", 7.0)])
def test_sizes(text, value):
    """Decimal and binary units."""
    assert units.read_size("--memory", text) == value


@pytest.mark.parametrize(("text", "said"), [("many", "write a size such as 24GB"), ("24", "has no unit: write 24GB")])
def test_wrong_sizes(text, said):
    """One line with an example; a number without a unit is not taken for bytes."""
    with pytest.raises(BadInput, match=said):
        units.read_size("--gpu-memory", text)


def test_units_suit_the_size():
    """Two digits, and never a 0.00; what rounds to a thousand has the next unit."""
    assert [units.size(n) for n in (999.4e6, 999.7e6, 999_999, 1000, 999, 5e15)] == [
        "999 MB",
        "1 GB",
        "1 MB",
        "1 KB",
        "999 B",
        "5,000 TB",
    ]
    assert [units.size(n) for n in (12, 4.1e6, 372e6, 2.7e9, 500e9)] == ["12 B", "4.1 MB", "372 MB", "2.7 GB", "500 GB"]
    assert [units.gpu_share(f) for f in (1.0, 1 / 7, 0.1428, 0.5, 0.4)] == [
        "1 GPU",
        "1/7 of a GPU",
        "1/7 of a GPU",
        "1/2 of a GPU",
        "0.4 GPU",
    ]
    assert [units.time(s) for s in (0.021, 3.26, 44, 720, 12_240)] == ["0.021 s", "3.3 s", "44 s", "12 min", "3.4 h"]
    assert units.time_range(4260, 16_560) == "1.2 to 4.6 h"
    assert units.time_range(8.5, 14) == "8.5 to 14 s"
    assert units.time_range(20, 7200) == "20 s to 2 h"
    assert units.time_range(60, 60.1) == "60 s"
    assert (units.hours(1), units.hours(12_000)) == ("under 0.01", "3.3")


@pytest.mark.slow
def test_the_command_prints_a_plan(tmp_path):
    """On this machine, measured by a probe; and for GPUs that it does not have, assumed, which it says."""

    def qdsim_plan(*options):
        command = [sys.executable, "-m", "qdsim", "plan", str(PROJECT / "jobs" / "quickstart.toml"), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    here = qdsim_plan()
    assert here.returncode == 0, here.stderr
    assert "it fits: 2 actors of" in here.stdout
    assert re.search(r"^ retrain +unlearn +1 ", here.stdout, re.MULTILINE)
    there = qdsim_plan("--gpus", "4", "--gpu-memory", "24GB")
    assert "assumed, not measured: 2.5 to 10 TFLOP/s" in there.stdout
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
        assert probe.gpu_memory() in (None, min(gpus.memory_here(), default=None))


@pytest.mark.parametrize(
    "job", sorted(path.stem for path in (PROJECT / "jobs").glob("*.toml") if path.stem not in ("quickstart",))
)
def test_a_jobs_header_says_what_its_plan_says(job, tmp_path):
    """The hours on the two GPUs that its comment names, within a tenth; SVHN's and the others' shapes are known."""
    text = (PROJECT / "jobs" / f"{job}.toml").read_text(encoding="utf-8")
    said = dict(re.findall(r"--gpu (\w+)(?:, which the paper had)?: ([\d.]+ to [\d.]+) h", text))
    assert set(said) == {"a100", "rtx2060"}
    loaded = config.load(PROJECT / "jobs" / f"{job}.toml", overrides=[f"data.root={tmp_path}"])
    assert f"all {len(loaded.seeds)} seeds `qdsim plan {job}`" in text
    for name, hours in said.items():
        machines = planner.imagined(1, None, None, None, name)
        planned = partial(planner.assumed, model=machines.model)
        found = planner.plan_job(loaded, machines, planned, planner.ASSUMED)
        ends_h = [end_s / 3600 for end_s in estimate.range_s(found.times, found.within)]
        assert [float(number) for number in hours.split(" to ")] == pytest.approx(ends_h, rel=0.1)
