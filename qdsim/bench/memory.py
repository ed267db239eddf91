"""Peak memory of 100 clients on the whole of SVHN, all processes together."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.data.datasets import SHAPES
from qdsim.errors import QdsimError

NAME = "memory"
ABOUT = "604,388 images over 100 clients: peak memory of all processes"
MOST_GB = 12.0
EVERY_S = 1.0
JOB = """name = "memory"
seeds = [0]
methods = ["quickdrop"]
requests = [{{ kind = "class", target = 9 }}]
[data]
dataset = "svhn+extra"
root = {root!r}
verify = false
[partition]
clients = 100
alpha = 0.1
[model]
width = 32
[train]
rounds = 3
steps = 5
participation = 0.1
[unlearn]
steps = 5
[recover]
rounds = 1
steps = 5
participation = 0.1
[relearn]
rounds = 0
[cluster]
clients_per_actor = "auto"
"""


def measure(data_root: str) -> Found:
    """Run the job as a user does, and add up what its processes hold of memory, once a second."""
    before = set(_processes())
    peak = [0, 0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            held = {pid: pss for pid in _processes() if pid not in before and (pss := _pss_bytes(pid))}
            peak[0], peak[1] = max(peak[0], sum(held.values())), max(peak[1], len(held))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.toml"
        path.write_text(JOB.format(root=data_root), encoding="utf-8")
        watcher = threading.Thread(target=watch)
        watcher.start()
        command = [sys.executable, "-m", "qdsim", "run", str(path), "--out", str(Path(folder) / "runs")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        over.set()
        watcher.join()
    if done.returncode:
        raise QdsimError((done.stderr or done.stdout).strip().splitlines()[-1])
    train, test, channels, size, _ = SHAPES["svhn+extra"]
    images_gb = (train + test) * channels * size**2 / 1e9
    case = f"100 clients, {train:,} images"
    peak_gb = peak[0] / 1e9
    measured = [
        Measured(NAME, case, "qdsim", "peak of all processes", peak_gb, "GB"),
        Measured(NAME, case, "qdsim", "processes at most", peak[1], ""),
        Measured(NAME, case, "qdsim", "one copy of the images", images_gb, "GB"),
    ]
    return Found(measured, [Ratio(NAME, case, "peak memory", peak_gb, MOST_GB, False, "GB")])


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _pss_bytes(pid: int) -> int:
    """Return a process's memory, its part of what is shared included; 0 for one that has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
