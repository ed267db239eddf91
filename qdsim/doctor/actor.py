"""The actor that examines the device which it is granted, set up as a client's actor is."""

import os
from pathlib import Path
from typing import Any

import ray
import torch

from qdsim.doctor import steps
from qdsim.doctor.checks import Check
from qdsim.doctor.steps import Expected
from qdsim.errors import CannotPlace
from qdsim.models.device import DeviceInfo, choose_device, describe, set_up
from qdsim.models.fast import fused
from qdsim.models.numerics import Numerics
from qdsim.planning.measured import GPU
from qdsim.ray_engine.environment import MPS_PIPES


@ray.remote(num_cpus=0)
class Examiner:
    """Makes the checks of one device."""

    def ready(self) -> None:
        """Have been placed, and have imported torch."""

    def examine(self, expected: Expected, where: str) -> tuple[list[Check], DeviceInfo | None]:
        """Return the checks, and the device that they were made on; None where it cannot be used."""
        numerics = Numerics()
        set_up(numerics)
        gpu_ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        try:
            device = choose_device(gpu_ids)
        except CannotPlace as error:
            return [Check(GPU, "fail", str(error), where=where)], None
        if device.type == "cuda":
            steps.setting(steps.SMALL, device, torch.float32).compute.gradients.warm_up()
        has = describe(device, fused.version())
        found = []
        if device.type == "cuda":
            says = f"{has.fingerprint}; driver {has.driver or 'unknown'}"
            says += f", {has.memory_bytes / 1e9:.1f} GB, CUDA MPS {_mps()}"
            found.append(Check(GPU, "pass", says, has.as_dict() | {"mps": _mps()}, where=where))
        return found + steps.examine(device, expected, where), has


def _mps() -> str:
    """Tell whether CUDA MPS serves this process: its daemon is reached through a pipe in a folder."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)
    return "on" if (Path(folder) / "control").exists() else "off"


def examiner(node_id: str, *, gpu: bool) -> Any:
    """Start one on a node."""
    cls: Any = Examiner
    return cls.options(num_gpus=1 if gpu else 0, label_selector={"ray.io/node-id": node_id}).remote()
