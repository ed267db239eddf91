"""From the command to the end of the first round, beside Flower; and where that time goes."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from qdsim.bench import flower
from qdsim.bench.rows import Found, Measured, Ratio

NAME = "startup"
ABOUT = "from the command to the end of the first round, against Flower"
CLIENTS, WIDTH, STEPS = 10, 32, 2
JOB = """name = "startup"
seeds = [0]
methods = ["retrain"]
requests = [{{ kind = "class", target = 9 }}]
[partition]
kind = "iid"
[model]
width = {width}
[train]
rounds = 2
steps = {steps}
batch_size = 64
[relearn]
rounds = 0
[cluster]
clients_per_actor = {packed}
"""


def measure(repeats: int, flower_python: str | None) -> Found:
    """Two actors against Flower's two, in turns; ten actors beside it."""
    seconds: dict[str, list[float]] = {"qdsim, 2 actors": [], "qdsim, 10 actors": []}
    if flower_python:
        seconds["Flower, 2 actors"] = []
    for _ in range(repeats):
        seconds["qdsim, 2 actors"].append(_first_round_s(2))
        if flower_python:
            run = flower.run(flower_python, clients=CLIENTS, share=1.0, actors=2, rounds=1, width=WIDTH, steps=STEPS)
            seconds["Flower, 2 actors"].append(run.first_s)
    seconds["qdsim, 10 actors"].append(_first_round_s(10))
    case = f"{CLIENTS} clients, W={WIDTH}"
    first = {side: median(values) for side, values in seconds.items()}
    measured = [Measured(NAME, case, side, "to the end of the first round", s, "s") for side, s in first.items()]
    for actors in (2, 10):
        for part, part_s in _parts(actors).items():
            measured.append(Measured(NAME, case, f"qdsim, {actors} actors", part, part_s, "s"))
    ratios = [Ratio(NAME, case, f"to the first round: {side}", first[side], unit="s") for side in first]
    if flower_python:
        factor = first["Flower, 2 actors"] / first["qdsim, 2 actors"]
        ratios.append(Ratio(NAME, case, "Flower's time to the first round against ours, 2 actors", factor, 1.0))
    return Found(measured, ratios)


def _first_round_s(actors: int) -> float:
    """Run a job as a user does, and wait for the line that says that its first round is over."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "startup.toml"
        path.write_text(JOB.format(width=WIDTH, steps=STEPS, packed=CLIENTS // actors), encoding="utf-8")
        command = [sys.executable, "-u", "-m", "qdsim", "run", str(path), "--out", str(Path(folder) / "runs")]
        began_s = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
            assert running.stdout is not None
            found = None
            lines = []
            for line in running.stdout:
                lines.append(line)
                if found is None and "train 1/2" in line:
                    found = time.perf_counter() - began_s
    if found is None:
        raise RuntimeError(f"the job did not reach its first round: {''.join(lines[-3:])}")
    return found


def _parts(actors: int) -> dict[str, float]:
    """Return what the same start is made of, measured in a process of its own."""
    command = [sys.executable, "-m", "qdsim.bench.startup", str(actors)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    parts: dict[str, float] = json.loads(found.stdout)
    return parts


def _take_apart(actors: int) -> dict[str, float]:
    """Do by hand what a run does, with a look at the clock in between."""
    clock: list[tuple[str, float]] = [("", time.perf_counter())]

    def mark(part: str) -> None:
        clock.append((part, time.perf_counter()))

    from qdsim.algorithms import fedavg
    from qdsim.bench import federations
    from qdsim.forgetting import View

    mark("importing torch and qdsim")
    wanted = federations.job(
        partition={"kind": "iid", "clients": CLIENTS},
        model={"width": WIDTH},
        train={"rounds": 1, "steps": STEPS, "batch_size": 64},
        cluster={"clients_per_actor": CLIENTS // actors},
    )
    dataset = federations.noise(1437, 1, 8)
    mark("data")
    with federations.on_ray(wanted, dataset, mark) as federation:
        federation.rounds(fedavg.phase("train", federation.cell.hyper.train, View("real")), 1)
        mark("first round")
    return {part: clock[i][1] - clock[i - 1][1] for i, (part, _) in enumerate(clock) if i}


if __name__ == "__main__":
    print(json.dumps(_take_apart(int(sys.argv[1]))))
