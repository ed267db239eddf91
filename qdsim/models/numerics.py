"""How a step is computed. Apart from ``compute.py``, which needs torch: a job is checked without it."""

from dataclasses import dataclass
from typing import Literal

from qdsim.ranges import Positive

CPU_MICRO_BATCH = 32
GPU_MICRO_BATCH = 256
"""What ``micro_batch = "auto"`` is."""


@dataclass(frozen=True)
class Numerics:
    """What moves bits, so it is the same in every process."""

    threads: Positive = 1
    """torch threads of each process."""
    micro_batch: Positive | Literal["auto"] = "auto"
    """Gradients are summed over pieces of this many samples; ``auto``: 32 on the CPU, where the cache is
    short, and 256 on a GPU."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """What convolutions and products are computed in. ``tf32``: on GPUs from Ampere on, ten bits of mantissa instead of
    23, which is several times as fast; ``bfloat16``: seven. Results change a little. On a CPU ``tf32`` is ``float32``.
    """
    compile: bool = False
    """Compile a step's passes on a CPU with ``torch.compile``: faster after a minute or two of warm-up, which later
    runs find in its cache. Needs a C++ compiler. Results change in their last digits. On GPUs it does nothing: their
    kernels are fused already."""
    winograd: Literal["matching", "always", "never"] = "matching"
    """Where convolutions of 64 channels or more on a CPU are done with a quarter of the multiplications
    (``models/fast/winograd.py``), and the first block with fewer passes over memory (``models/fast/patches.py``). The
    rounding of the former is coarser: ``matching`` leaves the model's own gradients as they are, only synthetic pixels
    change in their last digits; ``always`` trains faster, too."""
