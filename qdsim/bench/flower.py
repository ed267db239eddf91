"""Flower, measured: in an environment of its own, since it wants other versions of Ray and much else."""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from qdsim.errors import BadInput

APP = Path(__file__).with_name("flower_app.py")


@dataclass(frozen=True)
class Timing:
    """What a run of Flower took."""

    seconds: list[float]
    """Of each round."""
    first_s: float
    """From the command to the end of the first round."""


def run(python: str, *, clients: int, share: float, actors: int, rounds: int, width: int, steps: int = 0) -> Timing:
    """Run the federation of ``flower_app.py`` with this Python; ``steps`` of 0 is no work at all."""
    asked = {"clients": clients, "share": share, "actors": actors, "rounds": rounds, "width": width, "steps": steps}
    command = [python, str(APP), *(f"--{name}={value}" for name, value in asked.items())]
    command.append(f"--cpus={os.cpu_count() or 1}")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    began_s = time.time()
    found = subprocess.run(command, capture_output=True, text=True, env={**kept, **quiet}, check=False)
    try:
        done = json.loads(found.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (found.stderr or found.stdout).strip().splitlines()[-1:] or ["nothing"]
        fix = "give --flower the Python of an environment with flwr[simulation] and torch"
        raise BadInput("--flower", python, f"Flower did not run there ({said[0]}): {fix}") from None
    return Timing([float(value) for value in done["seconds"]], done["ended"][0] - began_s)
