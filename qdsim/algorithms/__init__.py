"""The methods, one file each.

| paper      | file           | forgets           |
|------------|----------------|-------------------|
| QuickDrop  | quickdrop.py   | classes, clients  |
| Retrain-Or | retrain.py     | classes, clients  |
| SGA-Or     | sga.py         | classes, clients  |
| FedEraser  | federaser.py   | classes, clients  |
| FU-MP      | fump.py        | classes           |
| S2U        | s2u.py         | clients           |

``local_sgd.py`` is the inner loop of Algorithm 1, ``fedavg.py`` its server, ``distillation.py`` the gradient
matching of §3.2.
"""

from types import ModuleType

from qdsim.algorithms import federaser, fump, quickdrop, retrain, s2u, sga

METHODS: dict[str, ModuleType] = {
    "quickdrop": quickdrop,
    "retrain": retrain,
    "sga": sga,
    "federaser": federaser,
    "fump": fump,
    "s2u": s2u,
}
"""Each module has ``phases(hyper, branch, history)``; ``qdsim/methods.py`` says what each can do."""
