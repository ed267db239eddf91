"""Retrain-Or: train again from scratch without the forget set (§2.3). The yardstick of all others.

Departures from the paper: none. What it leaves open: retraining begins from fresh random parameters, not
from the θ_0 of training, and runs as many rounds as training did; relearning has QuickDrop's settings.
"""

from dataclasses import replace

from qdsim.algorithms import fedavg
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Phase
from qdsim.algorithms.settings import Hyperparameters
from qdsim.algorithms.stopping import RETRAINED
from qdsim.data.forgetting import UnlearningRequest, View


def phases(hyper: Hyperparameters, settings: None, request: UnlearningRequest, history: History) -> list[Phase]:
    """FedAvg on D without D_f, by the clients that have anything left; then relearning, on real data (§4.7)."""
    retain = View("real", without=request.forgotten)
    return [
        replace(fedavg.phase("unlearn", hyper.train, retain, RETRAINED, hyper.server), start="fresh"),
        fedavg.relearn(hyper, request),
    ]
