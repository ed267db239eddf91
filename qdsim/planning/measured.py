"""What ``qdsim doctor`` has measured of a GPU, read from the file that it wrote: for ``qdsim plan --doctor FILE``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdsim.errors import BadInput
from qdsim.experiment.work import EVALUATION_COST, Costs
from qdsim.models.model import Model

SPEED, MEMORY, GPU = "speed", "memory against the estimate", "GPU"
"""Checks of the doctor's, whose numbers are read here."""
PLAIN, MATCHING = "plain training", "training with matching"


@dataclass(frozen=True)
class Measured:
    """Of the slowest, and the smallest, of the GPUs that were examined."""

    gpu: str
    memory_bytes: float
    context_bytes: int
    """What CUDA takes of a GPU for a process."""
    peak_share: float
    """Peak of the tensors, in terms of what was expected."""
    gradient_s: float
    """For a sample, of a network with so many operations a forward pass."""
    matching_s: float
    flops: float

    def costs(self, model: Model) -> Costs:
        """Return what a sample costs of another network: in proportion to its operations."""
        per_sample = Costs(self.gradient_s, self.gradient_s, self.matching_s, EVALUATION_COST * self.gradient_s)
        return per_sample.scaled(model.forward_flops / self.flops)


def speed_numbers(plain_ms: float, matching_ms: float, batch: int, matched: int, flops: float) -> dict[str, float]:
    """Return the numbers of the check of speed: of steps of ``batch`` samples, with ``matched`` synthetic images."""
    times = {f"{PLAIN}, ms": round(plain_ms, 3), f"{MATCHING}, ms": round(matching_ms, 3)}
    return times | {"batch": batch, "matched": matched, "flops": flops}


def read(path: str | Path) -> Measured:
    """Read a file of ``qdsim doctor --out``, or what ``--json`` printed; refuse one that was written without a GPU."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        checks = json.loads(text[text.index("{") :])["checks"]
        devices = [_measured(_of(checks, where)) for where in _places(checks)]
    except OSError as error:
        raise BadInput("--doctor", str(path), f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise BadInput("--doctor", str(path), "is no file of this version's `qdsim doctor --out FILE`") from None
    if not devices:
        raise BadInput("--doctor", str(path), "tells of no GPU whose speed and memory were measured")
    slowest = max(devices, key=lambda device: device.gradient_s)
    return Measured(
        gpu=slowest.gpu,
        memory_bytes=min(device.memory_bytes for device in devices),
        context_bytes=max(device.context_bytes for device in devices),
        peak_share=max(device.peak_share for device in devices),
        gradient_s=slowest.gradient_s,
        matching_s=slowest.matching_s,
        flops=slowest.flops,
    )


def _places(checks: list[dict[str, Any]]) -> list[str]:
    """Return where all that is read was measured."""
    found = [{c["where"] for c in checks if c["name"] == name and c["numbers"]} for name in (GPU, MEMORY, SPEED)]
    return sorted(set.intersection(*found))


def _of(checks: list[dict[str, Any]], where: str) -> dict[str, Mapping[str, Any]]:
    return {check["name"]: check["numbers"] for check in checks if check["where"] == where}


def _measured(numbers: dict[str, Mapping[str, Any]]) -> Measured:
    speed, memory = numbers[SPEED], numbers[MEMORY]
    plain_s, matching_s = (float(speed[f"{kind}, ms"]) / 1e3 for kind in (PLAIN, MATCHING))
    return Measured(
        gpu=str(numbers[GPU]["model"]),
        memory_bytes=float(memory["total_bytes"]),
        context_bytes=int(memory["context_bytes"]),
        peak_share=float(memory["peak_bytes"]) / float(memory["expected_tensor_bytes"]),
        gradient_s=plain_s / float(speed["batch"]),
        matching_s=max(0.0, matching_s - plain_s) / float(speed["matched"]),
        flops=float(speed["flops"]),
    )
