"""An attack of one's own: whoever the model is surer of than of half of all samples is taken for a member."""

import numpy as np
from sklearn.metrics import roc_auc_score, roc_curve

from qdsim.federation.attacks import Attack
from qdsim.federation.measures import FEATURES
from qdsim.federation.membership import AttackFeatures, Row

ENTROPY = FEATURES.index("entropy")


def judge(features: AttackFeatures) -> list[Row]:
    """A row for the forget set and one for the retain set."""
    everybody = np.concatenate([features.members, features.others])[:, ENTROPY]
    threshold = np.median(everybody)
    others = features.forget_others if len(features.forget_others) else features.others
    return [
        _row("forget", features.forget, others, threshold),
        _row("retain", features.members, features.others, threshold),
    ]


def _row(subset: str, inside: np.ndarray, outside: np.ndarray, threshold: float) -> Row:
    truth = np.repeat([1, 0], [len(inside), len(outside)])
    scores = -np.concatenate([inside, outside])[:, ENTROPY]
    false_rate, true_rate, _ = roc_curve(truth, scores)
    return {
        "subset": subset,
        "member_rate": float((inside[:, ENTROPY] <= threshold).mean()),
        "auc": float(roc_auc_score(truth, scores)),
        "tpr_at_1pct_fpr": float(true_rate[false_rate <= 0.01].max()),
    }


ATTACK = Attack("confidence", seed_purpose="confidence", about="by the entropy of the answer alone", judge=judge)
