"""``qdsim doctor``: what it checks here, what it says it could not, and what its file leaves out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import qdsim
from qdsim.algorithms.methods import METHODS
from qdsim.bench.fake_cuda import CUDA, Values, pretended
from qdsim.doctor import machine, report, steps
from qdsim.doctor.checks import Check, Report, about_this_machine, cleaned, secrets_of_this_machine
from qdsim.doctor.examine import ONLY_ON_GPUS, compare_gpus, examine
from qdsim.errors import BadInput
from qdsim.models.device import CONTEXT_BYTES, DeviceInfo, set_up
from qdsim.models.numerics import Numerics
from qdsim.planning import measured
from qdsim.planning.layout import Node
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

    def break_down(device, *others):
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    for name in ("compare", "evaluate", "repeat", "measure_speed"):
        monkeypatch.setattr(steps, name, break_down)
    found = {check.name: check for check in steps.examine(CPU, steps.Expected(), "node 0")}
    assert found["repeatable"].says == "RuntimeError: CUDA error: an illegal memory access"
    assert found["repeatable"].stops
    assert found["memory cap"].outcome == "not checked"


def test_what_it_recommends_fits_as_often_as_it_says():
    """7 of 3.3 GB in 24: 1/7 rounded up would be 0.1429, of which Ray places six; one of more than all is one."""
    share = steps.recommended_share(int(3.3e9), int(24e9))
    assert share == 0.1428
    assert Node("", 8.0, 1, 0).holds(share, 0, 0) == 7
    assert steps.recommended_share(int(30e9), int(24e9)) == 1.0


def test_graphs_are_compared_with_steps():
    """On a device that is only claimed, whose graphs repeat operations on the memory of the capture: the same bits."""
    with pretended(Values()):
        found = steps.capture(CUDA)
    assert found.outcome == "pass", found
    assert 'cluster.cuda_graphs = "auto" may be set' in found.says
    assert steps.capture(CPU).outcome == "not checked"


def examined(where, model, plain_ms, context_bytes, peak_bytes):
    """What a plan reads of the checks of a GPU, with numbers as the doctor makes them."""
    memory = {"total_bytes": 24e9, "context_bytes": context_bytes, "peak_bytes": peak_bytes}
    speed = measured.speed_numbers(plain_ms, plain_ms + 8.0, 256, 40, 1e8)
    return [
        Check(measured.GPU, "pass", "", {"model": model}, where=where),
        Check(measured.MEMORY, "pass", "", memory | {"expected_tensor_bytes": 2e9}, where=where),
        Check(measured.SPEED, "pass", "", speed, where=where),
    ]


def test_a_plan_uses_what_was_measured(tmp_path):
    """Two GPUs, the slower with 51.2 ms for 256 samples: 0.2 ms each, and 8 ms for 40 matched images: 0.2 ms each too.

    A network of a tenth of the operations takes a tenth. CUDA took 0.6 GB where 0.42 are expected, and steps a fifth
    more than expected: that is planned with, and said.
    """
    file = tmp_path / "doctor.txt"
    checks = examined("GPU 0", "A100", 51.2, 6e8, 1e9) + examined("GPU 1", "A30", 25.6, 3e8, 2.4e9)
    file.write_text(report.as_file(Report((*checks, Check("ports", "pass", "")), {})), encoding="utf-8")
    found = measured.read(file)
    assert (found.gpu, found.memory_bytes, found.context_bytes, found.peak_share) == ("A100", 24e9, 6e8, 1.2)
    costs = found.costs(SimpleNamespace(forward_flops=1e7))
    assert [costs.gradient_s, costs.learning_s, costs.matching_s] == [pytest.approx(2e-5)] * 3
    job = {"name": "x", "data": {"dataset": "cifar10", "root": "nowhere"}}
    without, planned = (qdsim.plan(job, gpus=1, gpu_memory="80GB", doctor=given) for given in (None, file))
    took, expected = planned.report.gpu_bytes, without.report.gpu_bytes
    shard = 5000 * 3072
    assert took - shard - 6e8 == pytest.approx(1.2 * (expected - shard - CONTEXT_BYTES), rel=1e-6)
    assert "measured by qdsim doctor on A100" in repr(planned)
    assert "CUDA took 600 MB a process where a run expects 419 MB" in repr(planned)
    assert "steps took 20 % more memory than a run expects" in repr(planned)


@pytest.mark.parametrize("text", ["", "no JSON", '{"checks": [{"name": "GPU"}]}'])
def test_a_file_that_is_none_of_the_doctors_is_refused(tmp_path, text):
    """Exit 2 with the command that writes one; the same of one that was written without a GPU."""
    (tmp_path / "d.txt").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match="is no file of this version's `qdsim doctor --out FILE`"):
        measured.read(tmp_path / "d.txt")
    (tmp_path / "d.txt").write_text(report.as_file(Report((Check("ports", "pass", ""),), {})), encoding="utf-8")
    with pytest.raises(BadInput, match="tells of no GPU"):
        measured.read(tmp_path / "d.txt")
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        measured.read(tmp_path / "none")


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
