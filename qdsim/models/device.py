"""How a process that computes is set up: threads, repeatable operations, precision, and its device.

``set_up`` is called once by every process that computes: a client actor, the driver, an inline run, a probe. Nothing
else sets what decides bits.
"""

import ctypes
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qdsim.errors import CannotPlace, UnusableGpu
from qdsim.models.numerics import CPU_MICRO_BATCH, GPU_MICRO_BATCH, Numerics

CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MB, one of two values with which cuBLAS repeats its results; another value, other bits."""
CONTEXT_BYTES = 400 * 2**20
"""What CUDA itself takes of a GPU for each process, before any tensor: 300 to 500 MB, by model and driver."""
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
BETWEEN = " + "


def set_up(numerics: Numerics) -> None:
    """Fix all that decides bits in this process; before CUDA starts, since cuBLAS reads its variable then."""
    torch.set_num_threads(numerics.threads)
    keep_freed_memory()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    torch.use_deterministic_algorithms(True)
    # or each new tensor would be filled first, for those who read what nobody has written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose algorithms by their speed at the moment
    # products with ten bits of mantissa; by default torch has them in convolutions alone
    torch.backends.cuda.matmul.allow_tf32 = numerics.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = numerics.precision == "tf32"
    # by default cuBLAS may add up products of short numbers in short numbers
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step instead of handing each back to the kernel.

    A client step allocates the same tensors over and over. By default blocks of some megabytes go back at once, and
    every fresh page costs a fault: about a fifth of the time of a step at W = 32. Does nothing where there is no glibc.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**30)


@dataclass(frozen=True)
class DeviceInfo:
    """The device of a process: what decides its bits, and for the manifest what else there is to say of it."""

    model: str
    """``cpu``, or the GPU's name."""
    capability: str = ""
    torch: str = ""
    cuda: str = ""
    cudnn: str = ""
    triton: str = ""
    """Its version where its kernels are in use."""
    driver: str = ""
    uuid: str = ""
    memory_bytes: int = 0

    @property
    def fingerprint(self) -> str:
        """Two devices of one fingerprint give the same bits: ``cpu``, or model, capability and libraries."""
        if self.model == "cpu":
            return "cpu"
        triton = f"Triton {self.triton}" if self.triton else "without Triton"
        return f"{self.model} ({self.capability}), torch {self.torch}, CUDA {self.cuda}, cuDNN {self.cudnn}, {triton}"

    def as_dict(self) -> dict[str, Any]:
        """Return what is known of it, for the manifest."""
        return {name: value for name, value in asdict(self).items() if value}


def join_devices(fingerprints: Iterable[str]) -> str:
    """Return several devices as one text, each once and in order; for one it is its fingerprint."""
    return BETWEEN.join(sorted({each for text in fingerprints for each in text.split(BETWEEN)}))


def are_gpus(fingerprints: str) -> bool:
    """Tell whether what :func:`join_devices` returned names GPUs alone."""
    return all(", torch " in each for each in fingerprints.split(BETWEEN))


def choose_device(gpu_ids: Sequence[str], *, cpu_fallback: bool = False) -> torch.device:
    """Return the GPU that Ray has granted, ready for use; the CPU where it has granted none.

    A granted GPU that torch cannot use is refused with the reason, unless the CPU may take its place: logical GPUs of a
    machine without any are such.
    """
    device, reason = granted_device(gpu_ids)
    if reason and not cpu_fallback:
        raise UnusableGpu(",".join(gpu_ids), reason)
    return device


def granted_device(gpu_ids: Sequence[str]) -> tuple[torch.device, str]:
    """Return the GPU that Ray has granted, or the CPU and why it is that: nothing where none was granted."""
    if not gpu_ids:
        return torch.device("cpu"), ""
    device = torch.device("cuda", device_index(gpu_ids[0], os.environ.get("CUDA_VISIBLE_DEVICES")))
    reason = why_unusable(device)
    if reason:
        return torch.device("cpu"), reason
    torch.cuda.set_device(device)
    return device, ""


def device_index(gpu_id: str, visible: str | None) -> int:
    """Return which of torch's devices is the granted one.

    Ray narrows CUDA_VISIBLE_DEVICES to it, so it is the first; under RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES the
    process sees all GPUs of the node, or those that the variable named before.
    """
    if visible:
        names = [name.strip() for name in visible.split(",")]
        return names.index(gpu_id) if gpu_id in names else 0
    return int(gpu_id) if visible is None and gpu_id.isdigit() else 0


def why_unusable(device: torch.device) -> str | None:
    """Say in a line why torch cannot compute on a GPU; None where it can, which is tried with a product."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs: install a build with CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        ones = torch.ones(16, 16, device=device)
        right = float((ones @ ones).sum()) == 16.0**3
    except (RuntimeError, AssertionError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "is not set" if visible is None else f"is {visible!r}"
        said = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        return f"{said}; torch {torch.__version__}, driver {driver_version() or 'none'}, CUDA_VISIBLE_DEVICES {seen}"
    return None if right else "a product of ones came out wrong"


def describe(device: torch.device, triton: str = "") -> DeviceInfo:
    """Return what is known of a device that this process can use; ``triton``: the version whose kernels it runs."""
    if device.type == "cpu":
        return DeviceInfo("cpu")
    has = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        model=has.name,
        capability=f"{has.major}.{has.minor}",
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        cudnn=cudnn_version(),
        triton=triton,
        driver=driver_version(),
        uuid=str(getattr(has, "uuid", "")),
        memory_bytes=has.total_memory,
    )


def driver_version() -> str:
    """Return the version of NVIDIA's driver; nothing where there is none."""
    try:
        said = DRIVER_VERSION.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return read_driver_version(said)


def cudnn_version() -> str:
    """Return the version of cuDNN as torch has it, a number; nothing in a build for CPUs."""
    return str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]


def read_driver_version(said: str) -> str:
    """Return the version in what the driver says of itself: the first number with a point in it."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", said)
    return found[0] if found else ""


def limit_memory(device: torch.device, share: float) -> None:
    """Keep a process to its share of a GPU's memory: Ray divides GPUs by their names only."""
    if device.type == "cuda" and 0 < share < 1:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_fraction(share, total), device)


def memory_fraction(share: float, total_bytes: int) -> float:
    """Return what torch may allocate of a GPU's memory in one of the floor(1/share) processes that Ray puts there.

    Torch counts tensors only; beside them each process has a context of :data:`CONTEXT_BYTES`, which must fit as well.
    """
    processes = int(1 / share + 1e-9)
    fraction = min(share, 1 / processes - CONTEXT_BYTES / total_bytes)
    if fraction <= 0:
        each = f"{CONTEXT_BYTES / 1e9:.1f} GB that CUDA takes in each of {processes} processes"
        fix = "set cluster.gpus_per_client higher, with cluster.clients_per_actor to match"
        raise CannotPlace(each, f"{total_bytes / 1e9:.1f} GB of GPU memory", fix)
    return fraction


# -- errors of a GPU ---------------------------------------------------------------------------------------------------

GpuFailure = Literal["gpu_failed", "out_of_memory"]
_NO_MEMORY = re.compile(r"out of memory|STATUS_ALLOC_FAILED|can't allocate memory")
_OF_THE_GPU = re.compile(
    r"\b(CUDA|cuDNN|cuDNN Frontend|cuSOLVER|cuFFT|cuSPARSE|CUDA driver|HIP) error\b|\bTriton Error \[(CUDA|HIP)\]"
    r"|\b(CUDNN|CUBLAS)_STATUS_"
)
_SIZE = r"(\d+(?:\.\d+)? (?:[KMGT]i?B|bytes))"
_NUMBERS = {
    "asked for": rf"[Tt]ried to allocate {_SIZE}",
    "on the card": rf"total capacity of {_SIZE}",
    "of them free": rf"of which {_SIZE} is free",
    "allowed to this process": rf"{_SIZE} allowed",
}
"""What torch says of a lack of memory, in the words of its allocator."""


def gpu_failure(error: BaseException) -> GpuFailure | None:
    """Tell an error of the GPU, after which its process is of no use, and a lack of memory, from all others.

    Torch has types for both, and raises RuntimeError with the words of CUDA or of one of its libraries as well.
    """
    if not isinstance(error, RuntimeError):
        return None
    said = str(error)
    of_the_gpu = bool(_OF_THE_GPU.search(said)) or isinstance(error, torch.AcceleratorError)
    on_the_cpu = "DefaultCPUAllocator" in said
    if isinstance(error, torch.OutOfMemoryError) or ((of_the_gpu or on_the_cpu) and _NO_MEMORY.search(said)):
        return "out_of_memory"
    return "gpu_failed" if of_the_gpu else None


def memory_numbers(said: str) -> str:
    """Return the numbers in what torch says of a lack of memory; its first line where there are none."""
    numbers = {name: re.search(pattern, said) for name, pattern in _NUMBERS.items()}
    found = [f"{match[1]} {name}" for name, match in numbers.items() if match is not None]
    return ", ".join(found) or (said.splitlines()[0] if said else "no word of how much")


def memory_advice(settings: Mapping[str, object], share: float) -> str:
    """Return which settings help against a lack of memory; ``share`` is what an actor has of a GPU, 0 on the CPU."""
    ways = []
    if 0 < share < 1:
        ways.append(f"cluster.gpus_per_client higher (now {share:g}) with cluster.clients_per_actor to match")
    if settings.get("clients_per_actor") != 1:
        ways.append(f"cluster.clients_per_actor lower (now {settings['clients_per_actor']})")
    batch = settings.get("micro_batch")
    now = {"auto": f"auto, {GPU_MICRO_BATCH if share else CPU_MICRO_BATCH}"}.get(str(batch), batch)
    ways += [f"cluster.micro_batch lower (now {now})", "model.width smaller"]
    return f"set {', or '.join(ways)}; the last two change results"
