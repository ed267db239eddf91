"""Hyperparameters that the methods' tests share."""

from dataclasses import asdict

from qdsim.algorithms.methods import FedEraser, Fump, S2u, Sga
from qdsim.algorithms.settings import Distillation, Hyperparameters, Recover, Relearn, Stage, Train, Unlearn
from tests.conftest import make_compute

PLAIN = Distillation(scale=3, lr=0.1, steps=1, batch=256, momentum=0.5, init="real", matching=True, finetune=0)
STAGE = Stage(rounds=3, steps=4, batch_size=6, lr=0.1, participation=1.0)
LIKE_STAGE = asdict(STAGE)
HYPER = Hyperparameters(
    train=Train(**LIKE_STAGE),
    unlearn=Unlearn(**LIKE_STAGE),
    recover=Recover(**LIKE_STAGE),
    relearn=Relearn(**LIKE_STAGE, data="mixed"),
    synthetic=PLAIN,
    max_loss=5.0,
    model=make_compute().model,
)
SGA = Sga(unlearn_rounds=2, recover_rounds=2, mode="ascent")
FEDERASER = FedEraser(interval=2, calibration=0.5, norm="tensor", first_round="auto", recover_rounds=3)
FUMP = Fump(prune=0.25, side="top", hook="activation", recover_rounds=4)
S2U = S2u(rounds=5, leaver=0.1, others="auto", recover_rounds=0)
