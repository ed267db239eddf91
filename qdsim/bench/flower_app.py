"""The same federation in Flower's simulation. Run by the Python of an environment that has ``flwr[simulation]``.

``python flower_app.py --clients 100 --share 0.1 --actors 10 --rounds 33`` prints as JSON when each round ended (seconds
since the epoch) and how long it took. It uses nothing of qdsim: with ``--steps`` clients do as many of the bare loop's
steps, which needs torch; without, they send zeros back.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

BATCH = 64


class Timed(FedAvg):
    """FedAvg that looks at the clock when a round begins and ends."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.began: list[float] = []
        self.ended: list[float] = []

    def configure_train(self, *arguments: Any, **named: Any) -> Any:
        """Begin a round."""
        self.began.append(time.time())
        return super().configure_train(*arguments, **named)

    def aggregate_train(self, *arguments: Any, **named: Any) -> Any:
        """End a round."""
        found = super().aggregate_train(*arguments, **named)
        self.ended.append(time.time())
        return found


def shapes(width: int, channels: int, size: int) -> list[tuple[int, ...]]:
    """Return the shapes of the ConvNet's parameters, in order."""
    found: list[tuple[int, ...]] = []
    inputs = channels
    for _ in range(3):
        found += [(width, inputs, 3, 3), (width,), (width,), (width,)]
        inputs = width
    side = 4 if size == 28 else size // 8
    return [*found, (10, width * side * side), (10,)]


def client_app(given: argparse.Namespace) -> ClientApp:
    """Return clients that take the model and send one of its size back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        if given.steps:
            sys.path.insert(0, str(Path(given.bare).parent))
            import bare  # the bare loop, beside this file

            arrays = bare.local(arrays, given.width, given.channels, given.size, given.steps, BATCH)
        else:
            arrays = [np.zeros_like(array) for array in arrays]
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 20})}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(given: argparse.Namespace, done: dict[str, Any]) -> ServerApp:
    """Return a server that averages; its clock ends up in ``done``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=given.share, fraction_evaluate=0.0, min_available_nodes=given.clients)
        start = [np.zeros(shape, np.float32) for shape in shapes(given.width, given.channels, given.size)]
        strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=given.rounds)
        done["ended"] = strategy.ended
        done["seconds"] = [end - begin for begin, end in zip(strategy.began, strategy.ended, strict=True)]

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("clients", 100), ("actors", 10), ("rounds", 13), ("width", 32), ("steps", 0), ("cpus", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--bare", default=__file__)
    given = parser.parse_args()
    done: dict[str, Any] = {}
    run_simulation(
        server_app=server_app(given, done),
        client_app=client_app(given),
        num_supernodes=given.clients,
        backend_config={
            "init_args": {"num_cpus": given.cpus, "include_dashboard": False},
            "client_resources": {"num_cpus": given.cpus / given.actors, "num_gpus": 0.0},
        },
    )
    print(json.dumps(done))
