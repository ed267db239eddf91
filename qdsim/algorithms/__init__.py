"""The methods, one file each.

| paper      | file           |
|------------|----------------|
| QuickDrop  | quickdrop.py   |
| Retrain-Or | retrain.py     |

``local_sgd.py`` is the inner loop of Algorithm 1, ``fedavg.py`` its server, ``distillation.py`` the gradient
matching of §3.2.
"""

from types import ModuleType

from qdsim.algorithms import quickdrop, retrain

METHODS: dict[str, ModuleType] = {"quickdrop": quickdrop, "retrain": retrain}
"""Each module has TITLE, SUPPORTS, USES_SYNTHETIC and ``phases(hyper, branch)``."""
