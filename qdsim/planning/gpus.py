"""GPUs by name, for machines that are not here, and how much memory those have that are.

The numbers are those of the makers' own documents, whose titles stand beside them: peaks for float32 outside of the
tensor cores, which is what qdsim computes with by default, and those of the tensor cores, dense, for the other
precisions. What a network gets of a peak is another matter: see
:data:`qdsim.planning.planner.LOW_SHARE`.
"""

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qdsim.errors import BadInput

SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
SMI_S = 10.0


@dataclass(frozen=True)
class GpuModel:
    """What a maker says of a GPU."""

    title: str
    memory_gb: float
    tflops: float
    """Peak of float32, outside of the tensor cores."""
    bandwidth_gb_s: float
    """Of its memory."""
    source: str
    """The title of the document that says so."""
    tf32_tflops: float = 0.0
    """Peaks of the tensor cores, without sparsity; 0 where they do not take such numbers."""
    bfloat16_tflops: float = 0.0


A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture, whitepaper"
GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture, whitepaper"
MODELS = {
    "rtx2060": GpuModel("GeForce RTX 2060", 6, 6.5, 336, "NVIDIA, GeForce RTX 2060: specifications"),
    "t4": GpuModel("T4", 16, 8.1, 320, "NVIDIA T4 Tensor Core GPU datasheet"),
    "v100": GpuModel("V100 16 GB, SXM2", 16, 15.7, 900, "NVIDIA V100 Tensor Core GPU datasheet"),
    "v100-32": GpuModel("V100 32 GB, SXM2", 32, 15.7, 900, "NVIDIA V100 Tensor Core GPU datasheet"),
    "a10": GpuModel("A10", 24, 31.2, 600, "NVIDIA A10 Tensor Core GPU datasheet", 62.5, 125),
    "a100": GpuModel("A100 40 GB, SXM4", 40, 19.5, 1555, A100_PAPER, 156, 312),
    "a100-80": GpuModel("A100 80 GB, SXM4", 80, 19.5, 2039, "NVIDIA A100 80GB Tensor Core GPU datasheet", 156, 312),
    "h100": GpuModel("H100 80 GB, SXM5", 80, 67.0, 3350, "NVIDIA H100 Tensor Core GPU datasheet", 495, 989),
    "h100-pcie": GpuModel("H100 80 GB, PCIe", 80, 51.0, 2000, "NVIDIA H100 Tensor Core GPU datasheet", 378, 756),
    "l4": GpuModel("L4", 24, 30.3, 300, "NVIDIA L4 Tensor Core GPU datasheet", 60, 121),
    "rtx3090": GpuModel("GeForce RTX 3090", 24, 35.6, 936, GA102_PAPER, 35.6, 71),
    "rtx4090": GpuModel("GeForce RTX 4090", 24, 82.6, 1008, "NVIDIA Ada GPU Architecture, whitepaper", 82.6, 165.2),
}
"""By the names that ``qdsim plan --gpu`` takes."""


BESIDE = re.compile(r"nvidia|tesla|geforce|sxm\d?|hbm\d?e?")
"""What names of GPUs have beside the model."""


def find(name: str) -> GpuModel:
    """Return a GPU by its name, however it is spelt: ``a100``, ``Tesla T4``, ``NVIDIA A100-SXM4-80GB``."""
    plain = re.sub("[^a-z0-9]", "", BESIDE.sub("", name.lower()))
    without = plain.replace("pcie", "")
    for wanted in (f"{without}pcie", without) if "pcie" in plain else (plain,):
        for known, model in MODELS.items():
            if wanted in _spellings(known, model):
                return model
    raise BadInput("--gpu", name, f"known are {', '.join(MODELS)}; of another give --gpus and --gpu-memory")


def named_by_driver(name: str) -> GpuModel | None:
    """Return a GPU by what the driver calls it (``NVIDIA A100-SXM4-40GB``); None where it is not one of these."""
    try:
        return find(name)
    except BadInput:
        return None


def _spellings(known: str, model: GpuModel) -> set[str]:
    """Return a name with and without the size of the memory, as letters and digits; a size in the name stays."""
    chip, _, apart = known.partition("-")
    size = f"{model.memory_gb:g}"
    sizes = ("", size, f"{size}gb")
    if apart == size:
        return {f"{chip}{written}" for written in sizes[1:]}
    return {f"{chip}{written}{apart}" for written in sizes}


def memory_here() -> list[float]:
    """Return the memory of each GPU of this machine, in bytes; nothing where no driver tells.

    The driver is asked by its own command: torch would take seconds to import and some of the memory.
    """
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
        return [float(line) * 2**20 for line in said.splitlines() if line.strip()]
    with suppress(OSError, ValueError):  # AMD's
        files = sorted(Path("/sys/class/drm").glob("card*/device/mem_info_vram_total"))
        return [float(file.read_text(encoding="utf-8")) for file in files]
    return []
