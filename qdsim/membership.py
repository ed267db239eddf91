"""Membership inference: can an attacker tell from the model's answers whether it was trained on a sample?

Both attacks see of each sample its loss, its label's probability and the entropy of the softmax
(:data:`qdsim.evaluation.FEATURES`), and learn on retained training samples (members) against test samples.
``member_rate`` is how often a subset's samples are taken for members: on F-Set the forget set's own training samples,
on R-Set retained ones. The yardstick is the retrained model of the same seed, not zero.

``literal`` is the attack that the paper names (Golatkar et al., Mixed-privacy forgetting, CVPR 2021): a support-vector
machine (RBF, C = 3, gamma = auto) on the entropy alone, trained on retained against test samples in the ratio that
they have, and asked about the samples that it learnt from. Where there are more members than others, "member" is
nearly always the best guess, so it says little; entropy also takes an answer that is surely wrong for a member's.
``balanced``, the default, takes as many members as others, learns on one half and is judged on the other, and knows
the label: logistic regression on all three features, standardised.

``auc`` and ``tpr_at_1pct_fpr`` compare a subset's members with non-members of its own kind: for a forgotten class the
test samples of that class, otherwise the test samples that the attack has not learnt from (``literal``: those that it
has).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from qdsim.evaluation import FEATURES

MOST_OF_A_KIND = 5_000
"""Samples of each kind in the balanced attack, half of them to learn from."""
MOST_IN_ALL = 10_000
"""Samples that the literal attack learns from."""
LOW_RATE = 0.01
ENTROPY = FEATURES.index("entropy")

Row = dict[str, float | str | None]


@dataclass(frozen=True)
class Sample:
    """How many samples of each kind an attack looks at."""

    members: int
    others: int
    forget: int
    forget_others: int


@dataclass(frozen=True)
class Seen:
    """Features of the drawn samples, float64 (n, 3) each."""

    members: np.ndarray
    """Of D without D_f."""
    others: np.ndarray
    """Of the test set; for a class request without the forgotten classes, but in the literal attack."""
    forget: np.ndarray
    """Of D_f."""
    forget_others: np.ndarray
    """Test samples of the forgotten class; empty at client level, where ``others`` serve."""


def sample_sizes(attack: str, members: int, others: int, forget: int, forget_others: int) -> Sample:
    """Say how many to draw of what there is."""
    if attack == "literal":
        share = min(1.0, MOST_IN_ALL / (members + others))
        members, others = round(share * members), round(share * others)
    else:
        members = others = min(MOST_OF_A_KIND, members, others) // 2 * 2
    return Sample(members, others, min(MOST_OF_A_KIND, forget), min(MOST_OF_A_KIND, forget_others))


def run(attack: str, seen: Seen) -> list[Row]:
    """Attack, and return a row for each subset."""
    return (_literal if attack == "literal" else _balanced)(seen)


def _literal(seen: Seen) -> list[Row]:
    members, others, forget, forget_others = (
        array[:, [ENTROPY]] for array in (seen.members, seen.others, seen.forget, seen.forget_others)
    )
    machine = SVC(C=3, gamma="auto", kernel="rbf")
    machine.fit(np.concatenate([members, others]), _labels(members, others))
    own_kind = forget_others if len(forget_others) else others
    return [_row("literal", machine, "forget", forget, own_kind), _row("literal", machine, "retain", members, others)]


def _balanced(seen: Seen) -> list[Row]:
    half = len(seen.members) // 2
    learnt_in, learnt_out = seen.members[:half], seen.others[:half]
    held_in, held_out = seen.members[half:], seen.others[half:]
    machine = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    machine.fit(np.concatenate([learnt_in, learnt_out]), _labels(learnt_in, learnt_out))
    own_kind = seen.forget_others if len(seen.forget_others) else held_out
    return [
        _row("balanced", machine, "forget", seen.forget, own_kind),
        _row("balanced", machine, "retain", held_in, held_out),
    ]


def _labels(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ones(len(inside), int), np.zeros(len(outside), int)])


def _row(attack: str, machine: Any, subset: str, inside: np.ndarray, outside: np.ndarray) -> Row:
    truth = _labels(inside, outside)
    score = np.concatenate([machine.decision_function(inside), machine.decision_function(outside)])
    false_rate, true_rate, _ = roc_curve(truth, score)
    return {
        "attack": attack,
        "subset": subset,
        "member_rate": float(machine.predict(inside).mean()),
        "auc": float(roc_auc_score(truth, score)),
        "tpr_at_1pct_fpr": float(true_rate[false_rate <= LOW_RATE].max()),
    }
