"""Hyper-parameters that the methods' tests share."""

from qdsim.hyper import Distillation, FedEraser, Fump, Hyper, S2u, Sga, Stage

PLAIN = Distillation(scale=3, lr=0.1, steps=1, batch=256, momentum=0.5, init="real", matching=True, finetune=0)
STAGE = Stage(rounds=3, steps=4, batch_size=6, lr=0.1, participation=1.0)
HYPER = Hyper(
    train=STAGE,
    unlearn=STAGE,
    recover=STAGE,
    relearn=STAGE,
    synthetic=PLAIN,
    max_loss=5.0,
    augment=True,
    relearn_mixed=True,
    sga=Sga(unlearn_rounds=2, recover_rounds=2, mode="ascent"),
    federaser=FedEraser(interval=2, calibration=0.5, norm="tensor", first_round="auto", recover_rounds=3),
    fump=Fump(prune=0.25, side="top", hook="activation", recover_rounds=4),
    s2u=S2u(rounds=5, leaver=0.1, others=None, recover_rounds=0),
)
