"""The benchmarks' own arithmetic, and what is made of their files; what they measure is no matter for tests."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from analysis.__main__ import app
from qdsim.algorithms import fedavg
from qdsim.bench import federations, idle, memory, suite
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.data.forgetting import View
from qdsim.experiment import plan
from qdsim.federation.client_host import ClientHost, Images, Shard
from qdsim.federation.executor import InlineExecutor
from qdsim.models.compute import make_compute

MADE = Found(
    [
        Measured("throughput", "W=32", "qdsim", "throughput", 2000.0, "samples/s"),
        Measured("throughput", "W=32", "bare PyTorch", "throughput", 1000.0, "samples/s"),
        Measured("overhead", "10 of 100 clients", "qdsim", "a client update", 3.0, "ms"),
        Measured("overhead", "10 of 100 clients", "Flower", "a client update", 30.0, "ms"),
        Measured("matching", "mnist, W=128, batch 256", "with matching", "compute of all clients", 3.0, "s"),
        Measured("matching", "mnist, W=128, batch 256", "without matching", "compute of all clients", 2.0, "s"),
        Measured("matching", "mnist, W=128, batch 256", "with matching", "compute of the largest client", 2.0, "s"),
        Measured("matching", "mnist, W=128, batch 256", "without matching", "compute of the largest client", 1.0, "s"),
        Measured("startup", "10 clients", "qdsim, 2 actors", "to the end of the first round", 8.0, "s"),
        Measured("startup", "10 clients", "qdsim, 2 actors", "starting Ray", 3.0, "s"),
        Measured("startup", "10 clients", "qdsim, 2 actors", "starting actors", 4.0, "s"),
        Measured("scaling", "2 actors", "10 clients", "a round", 0.1, "s"),
        Measured("scaling", "2 actors", "1000 clients", "a round", 10.0, "s"),
        Measured("scaling", "100 clients", "1 actors", "a round", 2.0, "s"),
        Measured("scaling", "100 clients", "2 actors", "a round", 1.0, "s"),
        Measured("gpu-counts", "bare PyTorch, FedAvg: one more step", "bare PyTorch", "launches", 54.0, ""),
        Measured("gpu-counts", "bare PyTorch, FedAvg: one more step", "bare PyTorch", "GB moved", 2.9, "GB"),
        Measured("gpu-counts", "FedAvg: one more step", "qdsim", "launches", 45.0, ""),
        Measured("gpu-counts", "FedAvg: one more step", "qdsim", "GB moved", 1.2, "GB"),
    ],
    [
        Ratio("throughput", "W=32", "throughput of qdsim against bare PyTorch", 2.0, 1.8),
        Ratio("overhead", "10 of 100 clients", "a client update of qdsim", 6.0, 5.0, False, "ms"),
        Ratio("scaling", "100 clients", "two actors against one", 2.0),
    ],
)


def test_an_aim_is_met_from_its_own_side():
    """2.0 ≥ 1.8 is met, 6 ms ≤ 5 ms is not; without an aim there is nothing to meet."""
    assert [ratio.met for ratio in MADE.ratios] == [True, False, None]
    assert [Ratio("a", "b", "c", 1.0, 1.0, side).met for side in (True, False)] == [True, True]


def test_what_was_measured_is_written_and_drawn(tmp_path):
    """Parquet, then a table with every ratio, its aim and whether it was met, and a picture of each benchmark."""
    suite.write(MADE, tmp_path)
    ratios = pd.read_parquet(tmp_path / "ratios.parquet")
    assert ratios["value"].tolist() == [2.0, 6.0, 2.0]
    ended = CliRunner().invoke(app, ["bench", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ended.exit_code == 0, ended.output
    lines = (tmp_path / "out" / "bench.md").read_text(encoding="utf-8").splitlines()
    assert lines[2] == ("| throughput | W=32 | throughput of qdsim against bare PyTorch | 2 times | ≥ 1.8 | met |")
    assert lines[3].endswith("| 6 ms | ≤ 5 | **not met** |")
    assert lines[4].endswith("| 2 times |  |  |")
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {
        f"bench_{name}" for name in ("throughput", "overhead", "matching", "startup", "scaling", "gpu-counts")
    }


def test_a_folder_without_measurements_gets_one_line(tmp_path):
    """Exit code 2, no traceback."""
    ended = CliRunner().invoke(app, ["bench", str(tmp_path)])
    assert ended.exit_code == 2
    assert "measured.parquet" in ended.output
    assert "Traceback" not in ended.output


def test_unknown_benchmarks_are_named(tmp_path):
    """The command says which there are."""
    command = [sys.executable, "-m", "qdsim", "bench", "speed"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    assert ended.stderr.strip().startswith("qdsim: NAME = 'speed': allowed: throughput, overhead, matching")
    assert suite.chosen([]) == [
        *("throughput", "overhead", "matching", "gradients", "startup", "memory", "scaling", "gpu-counts")
    ]


def test_without_its_data_memory_is_left_out(tmp_path):
    """Nothing is measured, and that is said."""
    console = Console(record=True, width=200)
    suite.run(["memory"], 1, None, None, console, tmp_path)
    said = console.export_text()
    assert "memory: left out; it needs --svhn" in said
    assert not (tmp_path / "ratios.parquet").exists()


def test_rounds_are_those_of_the_engine():
    """Two rounds of clients that do nothing leave the model as it was; all six clients take part.

    The zeros that come back have the model's size: W=4 on one channel of 8x8 pixels.
    """
    wanted = federations.job(
        partition={"kind": "iid", "clients": 6}, model={"width": 4}, train={"rounds": 1}, synthetic={"matching": False}
    )
    dataset = federations.noise(60, 1, 8)
    point, at = next(plan.build_plan(wanted, dataset).federations())
    compute = make_compute(point.model, torch.device("cpu"), wanted.cluster.numerics())
    images = Images(dataset.train_images, dataset.test_images, dataset.test_labels, dataset.normalization)
    executor = InlineExecutor(ClientHost(compute, images))
    shards = zip(at.partition.indices, at.labels, strict=True)
    owned = [Shard(i, rows, labels) for i, (rows, labels) in enumerate(shards)]
    executor.broadcast("assign_clients", point.model, 0, owned, None, setup=True)
    phase = replace(fedavg.phase("train", point.hyper.train, View("real")), client_step=idle.step)
    done = federations.Federation(point, at, executor).rounds(phase, 2)
    assert [len(result.updates) for result, _ in done] == [6, 6]
    assert all(elapsed_s > 0 for _, elapsed_s in done)
    assert done[0][0].updates[0].bytes_up == 4 * point.model.num_params
    start = point.model.init(torch.Generator().manual_seed(federations.SEED))
    assert all(torch.equal(done[-1][0].params[name], start[name]) for name in start)


def test_made_images_have_the_classes_of_the_real_ones():
    """MNIST's digits are not equally frequent: 5,923 zeros, 6,742 ones."""
    dataset = federations.like("mnist")
    assert np.bincount(dataset.train_labels)[:2].tolist() == [5923, 6742]
    assert dataset.train_images.shape == (60_000, 1, 28, 28)


def test_the_bare_loop_runs_by_itself():
    """One number for each round; the first, in which everything is allocated, is not among them."""
    settings = {"width": 4, "clients": 2, "steps": 1, "batch": 8, "rounds": 2, "channels": 1, "size": 8}
    command = [sys.executable, "-m", "qdsim.bench.bare", *(f"--{name}={value}" for name, value in settings.items())]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = json.loads(ended.stdout)
    assert len(seconds) == 2
    assert all(value > 0 for value in seconds)


def test_memory_is_read_of_processes_that_there_are():
    """This process holds something; one that has ended holds nothing."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert memory._pss_bytes(ended.pid) == 0
    assert memory._pss_bytes(next(pid for pid in memory._processes() if memory._pss_bytes(pid))) > 0


@pytest.mark.parametrize("name", list(suite.ABOUT))
def test_each_says_what_it_is_about(name):
    """A line for the terminal."""
    assert len(suite.ABOUT[name]) > 20
