"""Plain FedAvg through Ray against a bare PyTorch loop, evaluation and checkpoints off on both sides."""

import json
import subprocess
import sys
from statistics import median
from typing import Any

from qdsim.algorithms import fedavg
from qdsim.bench.federations import job, noise, on_ray
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.data.forgetting import View
from qdsim.models.fast.winograd import LEAST_CHANNELS

NAME = "throughput"
ABOUT = "plain FedAvg on Ray against a bare PyTorch loop"
CLIENTS, BATCH = 10, 256
STEPS = {32: 5, 128: 2}
"""Local steps of a round, by W."""
AIMS = {("qdsim", 32): 1.3, ("qdsim", 128): 1.1, ("qdsim compiled", 32): 1.8, ("qdsim compiled", 128): 1.8}
SIDES: dict[str, dict[str, Any]] = {
    "qdsim": {},
    "qdsim compiled": {"compile": True},
    "qdsim with Winograd": {"winograd": "always"},
}


def measure(rounds: int) -> Found:
    """Measure the bare loop before and after ours, each round by itself."""
    measured, ratios = [], []
    half = -(-rounds // 2)
    for width, steps in STEPS.items():
        case, samples = f"W={width}", CLIENTS * BATCH * steps
        seconds: dict[str, list[float]] = {"bare PyTorch": _bare(width, steps, half)}
        sides = {s: settings for s, settings in SIDES.items() if width >= LEAST_CHANNELS or "winograd" not in settings}
        for side, settings in sides.items():
            seconds[side] = _ours(width, steps, rounds, settings)
        seconds["bare PyTorch"] += _bare(width, steps, half)
        rate = {side: samples / median(found) for side, found in seconds.items()}
        measured += [Measured(NAME, case, side, "throughput", value, "samples/s") for side, value in rate.items()]
        for side in sides:
            text = f"throughput of {side} against bare PyTorch"
            ratios.append(Ratio(NAME, case, text, rate[side] / rate["bare PyTorch"], AIMS.get((side, width))))
    return Found(measured, ratios)


def _bare(width: int, steps: int, rounds: int) -> list[float]:
    asked = [f"--width={width}", f"--steps={steps}", f"--rounds={rounds}", f"--batch={BATCH}"]
    command = [sys.executable, "-m", "qdsim.bench.bare", *asked]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(value) for value in json.loads(found.stdout)]


def _ours(width: int, steps: int, rounds: int, settings: dict[str, Any]) -> list[float]:
    wanted = job(
        partition={"kind": "iid", "clients": CLIENTS},
        model={"width": width},
        train={"rounds": 1, "steps": steps, "batch_size": BATCH},
        synthetic={"matching": False},
        cluster={"clients_per_actor": CLIENTS // 2, **settings},
    )
    with on_ray(wanted, noise(CLIENTS * 1000, 3, 32)) as federation:
        phase = fedavg.phase("train", federation.point.hyper.train, View("real"))
        return [elapsed_s for _, elapsed_s in federation.rounds(phase, rounds + 1)[1:]]
