"""The attacks of membership inference: of each its name in jobs and tables, the seed of its draws, and what it is.

How they work stands in :mod:`qdsim.federation.membership`. This file needs no torch: a job is checked before torch is
loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str
    """In the job's ``membership`` and in the column ``attack``."""
    seed_purpose: str
    """Seeds the draw of its samples. It never changes, or every number of the attack would: both are named by the words
    that the attacks had up to schema version 3."""
    about: str


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
