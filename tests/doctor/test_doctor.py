"""``qdsim doctor``: what it checks here, what it says it could not, and what its file leaves out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qdsim.algorithms.methods import METHODS
from qdsim.doctor import machine, report, steps
from qdsim.doctor.checks import Check, Report, about_this_machine, cleaned, secrets_of_this_machine
from qdsim.doctor.examine import ONLY_ON_GPUS, compare_gpus, examine
from qdsim.models.device import DeviceInfo, set_up
from qdsim.models.numerics import Numerics
from tests.conftest import PROJECT

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("checks", "code", "says"),
    [
        ([Check("a", "pass", ""), Check("b", "not checked", "")], 0, "all that was checked is well; 1 could not be"),
        ([Check("a", "fail", "", vital=False)], 0, "all that would stop a run is well, but not: a"),
        ([Check("a", "fail", ""), Check("c", "pass", "")], 3, "1 would stop a run: a"),
    ],
)
def test_only_what_would_stop_a_run_is_a_failure(checks, code, says):
    """Exit 3 then, 0 else; what could not be checked is counted."""
    found = Report(tuple(checks), {})
    assert found.exit_code == code
    assert report.verdict(found).startswith(says)


def test_the_file_holds_no_path_host_or_token(monkeypatch, tmp_path):
    """Folders of the user, the host, addresses and whatever a variable's name calls a secret are replaced."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("CUDA_SOME_KEY", "hush-hush")
    monkeypatch.setenv("QDSIM_DATA_ROOT", "/srv/faces")
    monkeypatch.chdir(tmp_path)
    said = f"{tmp_path}/runs, {Path.home()}/x, /home/ann/y, /srv/faces/z, 0123456789abcdef, 10.1.2.3:6379, 127.0.0.1"
    text = report.as_file(Report((Check("a", "fail", said, {"file": said}),), about_this_machine()))
    for secret in (str(tmp_path), "/home/ann", "/srv/faces", "0123456789abcdef", "hush-hush", "10.1.2.3"):
        assert secret not in text
    assert "127.0.0.1" in text
    content = json.loads(text[text.index("{") :])
    assert content["about"]["environment"]["CUDA_SOME_KEY"] == "(set)"
    assert content["checks"][0]["numbers"]["file"].startswith(
        "./runs, ~/x, ~/y, $QDSIM_DATA_ROOT/z, (hidden), (address)"
    )
    assert cleaned("nothing to hide", secrets_of_this_machine()) == "nothing to hide"


def test_this_machine_is_checked_and_left_as_it_was(tmp_path):
    """All that a run needs is here, storage, ports and memory among it; the folder that was tried is gone again."""
    checks = {check.name: check for check in machine.check_machine(str(tmp_path / "runs"))}
    for name in ("cores", "vector instructions", "memory", "disk", "storage", "ports"):
        assert checks[name].outcome == "pass", checks[name]
    assert checks["cores"].numbers["cores"] == len(os.sched_getaffinity(0))
    assert list(tmp_path.iterdir()) == []


def test_storage_that_takes_no_file_would_stop_a_run(tmp_path):
    """A file where the folder should be."""
    (tmp_path / "file").touch()
    checks = {check.name: check for check in machine.check_machine(str(tmp_path / "file" / "runs"))}
    assert checks["storage"].stops
    assert "cannot be written where runs go" in checks["storage"].says


def test_data_that_are_there_are_named(monkeypatch, tmp_path):
    """None in an empty folder, which stops no run: digits needs none."""
    monkeypatch.setenv("QDSIM_DATA_ROOT", str(tmp_path))
    checks = {check.name: check for check in machine.check_machine(str(tmp_path))}
    assert checks["data sets"].outcome == "not checked"
    (tmp_path / "cifar10").mkdir()
    for split in ("train", "test"):
        (tmp_path / "cifar10" / f"{split}-0.parquet").touch()
    checks = {check.name: check for check in machine.check_machine(str(tmp_path))}
    assert (checks["data sets"].outcome, checks["data sets"].numbers["there"]) == ("pass", "cifar10")


def test_every_method_has_its_steps_compared():
    """Training with and without matching, fine-tuning, and each phase of the six methods."""
    here = steps.setting(steps.SMALL, CPU, torch.float32)
    names = [name for name, _ in steps.phases(here.hyper)]
    assert names[:3] == ["plain training", "training with matching", "finetune"]
    assert {name.partition(",")[0] for name in names[3:]} == {method.title for method in METHODS.values()}
    assert len(names) == 3 + 3 + 2 + 3 + 3 + 2 + 3


def test_a_difference_is_measured_by_the_largest_entry_of_its_kind():
    """θ: 0.02 of 4. The images have a scale of their own: 0.5 of 1. Rounding in a bias without a gradient is none."""
    expected = {"w": torch.tensor([4.0, 1.0]), "bias": torch.tensor([1e-9]), steps.IMAGES: torch.tensor([1.0])}
    found = {"w": torch.tensor([4.0, 1.02]), "bias": torch.tensor([-1e-9]), steps.IMAGES: torch.tensor([1.0])}
    assert steps.largest_difference(found, expected) == pytest.approx(0.005)
    assert steps.largest_difference(found | {steps.IMAGES: torch.tensor([0.5])}, expected) == pytest.approx(0.5)
    assert steps.largest_difference(expected, expected) == 0.0


def test_other_threads_or_images_are_other_bits():
    """The hash is that of the model and of the synthetic images: whatever changes either changes it."""
    set_up(Numerics())
    first = steps.hash_of_training(CPU)
    assert steps.hash_of_training(CPU) == first
    here = steps.setting(steps.SMALL, CPU, torch.float32)
    left = steps.outcome(here, dict(steps.phases(here.hyper))["training with matching"])
    left[steps.IMAGES][0, 0, 0, 0] += 1e-3
    assert steps.P.sha256(left)[:16] != first


def test_gpus_of_one_kind_must_agree():
    """Two cards of a model with one hash, another with its own; then the second differs, and is the first card."""

    def answer(model, uuid, found):
        return [Check("repeatable", "pass", "", {"here": found}), Check("speed", "pass", "")], DeviceInfo(
            model, uuid=uuid
        )

    own, bits = compare_gpus([answer("A100", "1", "aa"), answer("A100", "2", "aa"), answer("V100", "3", "bb")])
    assert (own.outcome, bits.outcome, bits.numbers["kinds"]) == ("pass", "pass", 2)
    own, bits = compare_gpus([answer("A100", "1", "aa"), answer("A100", "1", "ab")])
    assert own.stops
    assert bits.stops
    assert "A100" in bits.says


def test_a_check_that_raises_has_failed(monkeypatch):
    """And the others are made all the same."""

    def break_down(device):
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    for name in ("compare", "evaluate", "repeat", "measure_speed"):
        monkeypatch.setattr(steps, name, break_down)
    found = {check.name: check for check in steps.examine(CPU, 0, "node 0")}
    assert found["repeatable"].says == "RuntimeError: CUDA error: an illegal memory access"
    assert found["repeatable"].stops
    assert found["memory cap"].outcome == "not checked"


@pytest.mark.ray
@NO_GPU
def test_gpus_that_torch_cannot_use_would_stop_a_run(cluster_address, tmp_path):
    """The tests' cluster has two by name only: each is tried by an actor, and named with torch's reason."""
    heard = []
    found = examine(cluster_address, str(tmp_path), heard.append)
    gpus = [check for check in found.checks if check.name == "GPU"]
    assert [(check.where, check.stops) for check in gpus] == [("node 0, GPU 0", True), ("node 0, GPU 1", True)]
    assert all("torch cannot use it (" in check.says for check in gpus)
    assert found.exit_code == 3
    assert len(heard) == 4


@pytest.mark.ray
@pytest.mark.slow
@NO_GPU
def test_a_machine_without_gpus_is_well_and_says_what_it_could_not_check(tmp_path):
    """The command: a table, one file, exit 0. Steps agree with autograd, and repeat in fresh processes."""
    command = [
        sys.executable,
        "-m",
        "qdsim",
        "doctor",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path / "d.txt"),
    ]
    done = subprocess.run([*command, "--json"], cwd=PROJECT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    outcomes = {check["name"]: check["outcome"] for check in content["checks"]}
    for name in ("Ray", "client steps against autograd", "evaluation", "repeatable", "speed"):
        assert outcomes[name] == "pass", content
    assert {name for name, outcome in outcomes.items() if outcome == "not checked"} >= set(ONLY_ON_GPUS)
    text = (tmp_path / "d.txt").read_text(encoding="utf-8")
    assert "all that was checked is well" in text
    assert json.loads(text[text.index("{") :])["checks"] == content["checks"]
    assert not (tmp_path / "runs").exists()
