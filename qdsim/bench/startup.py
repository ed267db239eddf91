"""From the command to the end of the first round, beside Flower; and where that time goes."""

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from qdsim.bench import federations, flower
from qdsim.bench.rows import Found, Measured, Ratio

NAME = "startup"
ABOUT = "from the command to the end of the first round, against Flower"
CLIENTS, WIDTH, STEPS = 10, 32, 2
JOB = """name = "startup"
seeds = [0]
methods = ["retrain"]
requests = [{{ kind = "class", target = 9 }}]
[data]
dataset = "parquet:{images}"
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
MARKS = {"results in": "Ray; beside it imports, data, plan", "train 1/2": "driver and clients, first round"}
"""What a line of the run's says, and what was done by then."""


def measure(repeats: int, flower_python: str | None) -> Found:
    """Two actors against Flower's two, in turns; ten actors beside it."""
    parts: dict[str, list[dict[str, float]]] = {"qdsim, 2 actors": [], "qdsim, 10 actors": []}
    theirs = []
    for _ in range(repeats):
        parts["qdsim, 2 actors"].append(_to_first_round(2))
        if flower_python:
            run = flower.run(flower_python, clients=CLIENTS, share=1.0, actors=2, rounds=1, width=WIDTH, steps=STEPS)
            theirs.append(run.first_s)
    parts["qdsim, 10 actors"].append(_to_first_round(10))
    case = f"{CLIENTS} clients, W={WIDTH}"
    first = {side: median(sum(found.values()) for found in runs) for side, runs in parts.items()}
    if theirs:
        first["Flower, 2 actors"] = median(theirs)
    measured = [Measured(NAME, case, side, "to the end of the first round", s, "s") for side, s in first.items()]
    for side, runs in parts.items():
        for part in runs[0]:
            measured.append(Measured(NAME, case, side, part, median(found[part] for found in runs), "s"))
    ratios = [Ratio(NAME, case, f"to the first round: {side}", first[side], unit="s") for side in first]
    if theirs:
        factor = first["Flower, 2 actors"] / first["qdsim, 2 actors"]
        ratios.append(Ratio(NAME, case, "Flower's time to the first round against ours, 2 actors", factor, 1.0))
    return Found(measured, ratios)


def _to_first_round(actors: int) -> dict[str, float]:
    """Run a job as a user does, and look at the clock when it says how far it has come."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "startup.toml"
        _write_images(Path(folder))
        settings = {"images": folder, "width": WIDTH, "steps": STEPS, "packed": CLIENTS // actors}
        path.write_text(JOB.format(**settings), encoding="utf-8")
        command = [sys.executable, "-u", "-m", "qdsim", "run", str(path), "--out", str(Path(folder) / "runs")]
        found: dict[str, float] = {}
        lines = []
        before_s = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                part = next((part for text, part in MARKS.items() if text in line and part not in found), None)
                if part:
                    now_s = time.perf_counter()
                    found[part], before_s = now_s - before_s, now_s
    if MARKS["train 1/2"] not in found:
        raise RuntimeError(f"the job did not reach its first round: {''.join(lines[-3:])}")
    return found


def _write_images(folder: Path) -> None:
    """Write images of the size that Flower's clients are given, 200 for each client."""
    for split, count in (("train", 200 * CLIENTS), ("test", 200)):
        made = federations.noise(count, 3, 32)
        files = []
        for image in made.train_images:
            held = io.BytesIO()
            Image.fromarray(image.transpose(1, 2, 0)).save(held, "png")
            files.append({"bytes": held.getvalue(), "path": None})
        table = pa.table({"img": files, "label": made.train_labels})
        pq.write_table(table, folder / f"{split}-0.parquet")
