"""The ConvNet's gradients written out against autograd's, which every other network takes: steps in turns."""

from dataclasses import replace
from statistics import median

import numpy as np

from qdsim.bench.federations import job
from qdsim.bench.rows import Found, Measured, Ratio
from qdsim.experiment.work import Costs
from qdsim.models.convnet import ConvNet
from qdsim.planning.probe import ProbeClient
from qdsim.planning.probe import measure as probe

NAME = "gradients"
ABOUT = "the ConvNet's gradients written out against autograd's"
SAMPLES, BATCH = 5000, 256
QUANTITIES = {
    "gradient_s": "a sample's gradient",
    "learning_s": "a sample's gradient, by class",
    "matching_s": "a synthetic image's matching",
}


def measure(rounds: int) -> Found:
    """Ten classes of CIFAR-10's shape, all in every batch; one process, by its own CPU time."""
    found = Found([], [])
    for width in (32, 128):
        model, case = ConvNet(3, 32, 10, width), f"W={width}"
        hyper = job(train={"batch_size": BATCH}).hyperparameters(model)
        client = ProbeClient(model, hyper, True, np.arange(SAMPLES) % 10, job().cluster.numerics())
        sides = {"written out": client, "autograd": replace(client, model=replace(model, autograd=True))}
        turns: dict[str, list[Costs]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, sample in sides.items():
                turns[side].append(probe(sample))
        for name, quantity in QUANTITIES.items():
            took_s = {side: median(getattr(costs, name) for costs in turns[side]) for side in sides}
            found.measured.extend(Measured(NAME, case, s, quantity, 1e3 * value, "ms") for s, value in took_s.items())
            ratio = took_s["autograd"] / took_s["written out"]
            found.ratios.append(Ratio(NAME, case, f"{quantity}: autograd against written out", ratio))
    return found
