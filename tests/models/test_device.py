"""How a process that computes is set up, and what a GPU's errors are; whatever can be told without a GPU."""

import subprocess
import sys

import pytest
import torch

from qdsim.errors import CannotPlace
from qdsim.models import device as D

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
GIB = 2**30
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 5.50 GiB memory in use. 5.92 GiB allowed; Of the allocated "
    "memory 5.01 GiB is allocated by PyTorch, and 472.05 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(("precision", "tf32"), [("float32", False), ("tf32", True), ("bfloat16", False)])
def test_a_process_is_set_up_to_repeat_itself(precision, tf32):
    """Deterministic algorithms, none chosen by speed, cuBLAS's workspace before CUDA starts, TF32 as asked; sums are
    in float32."""
    code = (
        "import os, torch\nfrom qdsim.models.device import set_up\nfrom qdsim.models.numerics import Numerics\n"
        f"set_up(Numerics(precision={precision!r}))\n"
        "c, m = torch.backends.cudnn, torch.backends.cuda.matmul\n"
        "print(torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory,\n"
        "      os.environ['CUBLAS_WORKSPACE_CONFIG'], torch.cuda.is_initialized(), c.deterministic, c.benchmark,\n"
        "      c.allow_tf32, m.allow_tf32, m.allow_bf16_reduced_precision_reduction,\n"
        "      m.allow_fp16_reduced_precision_reduction)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "True",
        "False",
        ":4096:8",
        "False",
        "True",
        "False",
        str(tf32),
        str(tf32),
        "False",
        "False",
    ]


@pytest.mark.parametrize(
    ("gpu_id", "visible", "index"),
    [
        ("3", "3", 0),  # as Ray narrows it
        ("3", None, 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
        ("5", "4,5", 1),  # the same on a node that shows two of its GPUs
        ("GPU-8f2c", "GPU-11aa, GPU-8f2c", 1),
        ("3", "", 0),  # none is visible: that torch cannot use it is told next
    ],
)
def test_the_granted_gpu_is_the_one_that_is_used(gpu_id, visible, index):
    """By its place among those that the process sees."""
    assert D.device_index(gpu_id, visible) == index


@WITHOUT_GPU
def test_a_granted_gpu_that_torch_cannot_use_is_refused_with_the_reason():
    """Here there is none, or torch is built without CUDA: one line with the reason, unless the CPU is allowed."""
    with pytest.raises(CannotPlace) as caught:
        D.choose_device(["0"])
    said = str(caught.value)
    assert said.startswith("the cluster cannot host this run: asked for GPU 0, found that torch cannot use it (")
    assert torch.__version__ in said
    assert said.endswith("or set cluster.cpu_fallback to true: clients then run on the CPU")
    assert "\n" not in said
    assert D.choose_device(["0"], cpu_fallback=True).type == "cpu"
    assert D.choose_device([]).type == "cpu"


def test_a_process_leaves_room_for_the_contexts_of_all_on_its_gpu():
    """24 GiB: four processes of a quarter, 6 GiB each with a context of 400 MiB, so 5.61 GiB of tensors.

    Of 0.4 two fit, which leaves 2.4 GiB each beside the 9.6 GiB: more than a context takes. Fifty in 8 GiB have 164 MiB
    each: less than that.
    """
    assert D.memory_fraction(0.25, 24 * GIB) * 24 == pytest.approx(6 - 400 / 1024)
    assert D.memory_fraction(0.4, 24 * GIB) == 0.4
    assert D.memory_fraction(1 / 3, 24 * GIB) * 24 == pytest.approx(8 - 400 / 1024)
    with pytest.raises(
        CannotPlace, match=r"0\.4 GB that CUDA takes in each of 50 processes, found 8\.6 GB of GPU memory"
    ):
        D.memory_fraction(0.02, 8 * GIB)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(TORCH_SAYS), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out_of_memory"),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "gpu_failed"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "gpu_failed"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), "gpu_failed"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "gpu_failed"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory"),
        (RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans"), "gpu_failed"),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), None),
        (RuntimeError("out of memory, said by somebody else"), None),
        (ValueError("CUDA error: no error of torch's"), None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_errors_of_a_gpu_are_told_from_those_of_a_program(error, kind):
    """By torch's types, and by the words with which it passes on what CUDA and its libraries say."""
    assert D.gpu_failure(error) == kind


def test_torchs_own_type_is_enough():
    """Whatever it says."""
    assert D.gpu_failure(torch.AcceleratorError("GPU is lost")) == "gpu_failed"


def test_what_torch_really_raises_without_memory():
    """A petabyte of this machine's memory, with its number."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert D.gpu_failure(caught.value) == "out_of_memory"
    assert D.memory_numbers(str(caught.value)) == "1125899906842624 bytes asked for"


def test_the_numbers_of_a_full_gpu():
    """Out of torch's three lines: what was asked for, what there is, and what this process may take of it."""
    expected = "2.00 GiB asked for, 23.69 GiB on the card, 1.20 GiB of them free, 5.92 GiB allowed to this process"
    assert D.memory_numbers(TORCH_SAYS) == expected
    assert D.memory_numbers("CUDA error: out of memory\nmore") == "CUDA error: out of memory"


def test_what_helps_depends_on_what_was_set():
    """A quarter of a GPU: a larger share first, which changes no bit; packed clients: fewer of them."""
    alone = D.memory_advice({"clients_per_actor": 1, "micro_batch": "auto"}, 0.25)
    assert alone.startswith(
        "set cluster.gpus_per_client higher (now 0.25) with cluster.clients_per_actor to match, or "
    )
    assert "clients_per_actor lower" not in alone
    assert "cluster.micro_batch lower (now auto, 256), or model.width smaller" in alone
    packed = D.memory_advice({"clients_per_actor": 5, "micro_batch": 64}, 0.0)
    assert packed.startswith("set cluster.clients_per_actor lower (now 5), or cluster.micro_batch lower (now 64)")


def test_devices_are_compared_by_what_decides_bits():
    """Two cards of a model with other numbers are one; another model or another cuDNN is not. A CPU is a CPU."""
    kind = "NVIDIA A100", "8.0", "2.9", "12.8", "91002"
    first = D.DeviceInfo(*kind, "3.5", driver="550.54", uuid="GPU-1", memory_bytes=1)
    second = D.DeviceInfo(*kind, "3.5", driver="555.42", uuid="GPU-2", memory_bytes=2)
    expected = "NVIDIA A100 (8.0), torch 2.9, CUDA 12.8, cuDNN 91002, Triton 3.5"
    assert first.fingerprint == second.fingerprint == expected
    assert D.DeviceInfo(*kind).fingerprint.endswith("cuDNN 91002, without Triton")
    assert D.DeviceInfo("NVIDIA A100", "8.0", "2.9", "12.8", "91100").fingerprint != first.fingerprint
    assert D.describe(torch.device("cpu")).fingerprint == "cpu"
    assert D.describe(torch.device("cpu")).as_dict() == {"model": "cpu"}
    assert D.join_devices(["cpu"]) == "cpu"
    assert D.join_devices(["b + a", "a"]) == "a + b"
    assert D.are_gpus(f"{expected} + {D.DeviceInfo(*kind).fingerprint}")
    assert not D.are_gpus(D.join_devices(["cpu", expected]))


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024", "550.54.14"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build", "570.86"),
        ("", ""),
    ],
)
def test_the_drivers_version_is_read(said, version):
    """Of both kinds of NVIDIA's kernel module."""
    assert D.read_driver_version(said) == version
