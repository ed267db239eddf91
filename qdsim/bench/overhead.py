"""Rounds with no client work: the simulator's own time for a client's update, beside Flower's."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

from qdsim.algorithms import fedavg
from qdsim.bench import flower, idle
from qdsim.bench.federations import job, noise, on_ray
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.data.forgetting import View

NAME = "overhead"
ABOUT = "the time of a client update without any work, against Flower"
CLIENTS, SHARE, ACTORS, WIDTH = 100, 0.1, 10, 32
MOST_MS = 5.0
LEAST_TIMES = 5.0


def measure(rounds: int, flower_python: str | None) -> Found:
    """Time rounds in which nobody computes anything."""
    case = f"{round(CLIENTS * SHARE)} of {CLIENTS} clients on {ACTORS} actors, W={WIDTH}"
    wanted = job(
        partition={"kind": "iid", "clients": CLIENTS},
        model={"width": WIDTH},
        train={"rounds": 1, "participation": SHARE},
        synthetic={"matching": False},
        cluster={"clients_per_actor": CLIENTS // ACTORS, "memory_per_actor_gb": 0.4},
    )
    count = 10 * rounds
    often = 10 * count  # as long as Flower takes for its own: the machine's moods last for seconds
    with on_ray(wanted, noise(CLIENTS * 20, 3, 32)) as federation:
        phase = replace(fedavg.phase("train", federation.point.hyper.train, View("real")), client_step=idle.step)
        ours = [elapsed_s for _, elapsed_s in federation.rounds(phase, often + 3)[3:]]
        empty = [_timed(partial(federation.executor.broadcast, "storage_bytes")) for _ in range(often)]
    in_round = round(CLIENTS * SHARE)
    update_ms = {"an empty call to an actor": 1000 * median(empty) / ACTORS, "qdsim": 1000 * median(ours) / in_round}
    if flower_python:
        theirs = flower.run(flower_python, clients=CLIENTS, share=SHARE, actors=ACTORS, rounds=count + 3, width=WIDTH)
        update_ms["Flower"] = 1000 * median(theirs.seconds[3:]) / in_round
    measured = [Measured(NAME, case, side, "a client update", value, "ms") for side, value in update_ms.items()]
    ratios = [Ratio(NAME, case, "a client update of qdsim", update_ms["qdsim"], MOST_MS, False, "ms")]
    if "Flower" in update_ms:
        factor = update_ms["Flower"] / update_ms["qdsim"]
        ratios.append(Ratio(NAME, case, "Flower's time for an update against ours", factor, LEAST_TIMES))
    return Found(measured, ratios)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
