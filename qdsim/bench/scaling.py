"""Cost of a round against the number of clients, and of actors: it should be a straight line."""

from statistics import median

import numpy as np

from qdsim.algorithms import fedavg
from qdsim.bench.federations import job, noise, on_ray
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.data.forgetting import View

NAME = "scaling"
ABOUT = "cost of a round against clients and actors"
CLIENTS = (10, 30, 100, 300, 1000)
ACTORS = (1, 2, 4, 8)
WIDTH, BATCH, STEPS = 16, 32, 2
ON_ACTORS = 100
"""Clients where actors are varied."""


def measure(rounds: int) -> Found:
    """All clients take part in each round, and each does a little real work."""
    clients = {count: _round_s(count, 2, rounds) for count in CLIENTS}
    actors = {count: _round_s(ON_ACTORS, count, rounds) for count in ACTORS}
    measured = [Measured(NAME, "2 actors", f"{n} clients", "a round", value, "s") for n, value in clients.items()]
    measured += [
        Measured(NAME, f"{ON_ACTORS} clients", f"{n} actors", "a round", value, "s") for n, value in actors.items()
    ]
    most, least = CLIENTS[-1], CLIENTS[2]
    per_client = (clients[most] / most) / (clients[least] / least)
    slope, base = np.polyfit(list(clients), list(clients.values()), 1)
    fitted = slope * np.array(CLIENTS) + base
    left = np.abs(fitted / np.array(list(clients.values())) - 1)
    cores = actors[1] / actors[2]
    case = f"{WIDTH} wide, {STEPS} steps of {BATCH}"
    return Found(
        measured,
        [
            Ratio(NAME, case, f"a client's cost with {most} clients against {least}", per_client, None, False),
            Ratio(
                NAME, case, f"farthest from a straight line, of {least} clients or more", float(left[2:].max()), None
            ),
            Ratio(NAME, f"{ON_ACTORS} clients", "two actors against one", cores),
            Ratio(NAME, f"{ON_ACTORS} clients", f"{ACTORS[-1]} actors against two", actors[2] / actors[ACTORS[-1]]),
        ],
    )


def _round_s(clients: int, actors: int, rounds: int) -> float:
    wanted = job(
        partition={"kind": "iid", "clients": clients},
        model={"width": WIDTH},
        train={"rounds": 1, "steps": STEPS, "batch_size": BATCH},
        synthetic={"matching": False},
        cluster={"clients_per_actor": -(-clients // actors), "memory_per_actor_gb": 0.4},
    )
    with on_ray(wanted, noise(clients * 40, 1, 28)) as federation:
        phase = fedavg.phase("train", federation.point.hyper.train, View("real"))
        return median(elapsed_s for _, elapsed_s in federation.rounds(phase, rounds + 1)[1:])
