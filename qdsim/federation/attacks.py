"""The attacks of membership inference: of each its name in jobs and tables, the seed of its draws, and what it is.

How those of qdsim work stands in :mod:`qdsim.federation.membership`. One from outside is an :class:`Attack` with a
``judge``, named in a job as ``package.module:NAME`` or by an entry point in the group ``qdsim.attacks``. This file
needs no torch: a job is checked before torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from qdsim import plugins
from qdsim.errors import BadInput

if TYPE_CHECKING:
    from qdsim.federation.membership import AttackFeatures, Row


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str
    """In the job's ``membership`` and in the column ``attack``."""
    seed_purpose: str
    """Seeds the draw of its samples. It never changes, or every number of the attack would: both are named by the words
    that the attacks had up to schema version 3."""
    about: str
    judge: Callable[[AttackFeatures], list[Row]] | None = None
    """Of an attack from outside: from the features of members and others to a row for each subset (``forget`` and
    ``retain``) with ``member_rate``, ``auc`` and ``tpr_at_1pct_fpr``; it gets as many members as others."""


LOSS_THRESHOLD = Attack(
    "loss_threshold",
    seed_purpose="membership-balanced",
    about="a sample whose loss is below a threshold is a member; as many members as others, and it knows the label",
)
ENTROPY_SVM = Attack(
    "entropy_svm",
    seed_purpose="membership-literal",
    about="the paper's: a support-vector machine on the entropy of the answer, members and others in their own ratio",
)
ATTACKS = {attack.name: attack for attack in (LOSS_THRESHOLD, ENTROPY_SVM)}


@cache
def find(name: str) -> Attack:
    """Return an attack by its name, or by where it stands outside this package; refuse what is none."""
    if name in ATTACKS:
        return ATTACKS[name]
    found = plugins.load_named("attack", "membership", name, ATTACKS)
    if not isinstance(found, Attack) or found.judge is None:
        what = "an Attack without judge" if isinstance(found, Attack) else f"a {type(found).__name__}"
        raise BadInput("membership", name, f"is {what}; wanted is a qdsim.federation.attacks.Attack with judge")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", found.name) or found.name in ATTACKS:
        wanted = "small letters, digits and _, and none of qdsim's own"
        raise BadInput("membership", name, f"its name is {found.name!r}; allowed are {wanted}")
    return found
