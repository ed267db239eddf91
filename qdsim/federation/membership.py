"""Membership inference: can an attacker tell from the model's answers whether it was trained on a sample?

Both attacks see of each sample its loss and the entropy of the softmax (:data:`~qdsim.federation.measures.FEATURES`),
and learn on retained training samples (members) against test samples. ``member_rate`` is how often a subset's samples
are taken for members: on F-Set the forget set's own training samples, on R-Set retained ones. The yardstick is the
retrained model of the same seed, not zero.

``entropy_svm`` is the attack that the paper names (Golatkar et al., Mixed-privacy forgetting, CVPR 2021): a
support-vector machine (RBF, C = 3, gamma = auto) on the entropy alone, trained on retained against test samples in the
ratio that they have, and asked about the samples that it learned from. Where there are more members than others,
"member" is nearly always the best guess, so it says little; entropy also takes an answer that is surely wrong for a
member's.

``loss_threshold``, the one to look at, knows the label and which way membership shows (Yeom et al., CSF 2018): a sample
whose loss is below a threshold is a member. It takes as many members as others, learns the threshold (Youden's, within
the middle 90 % of losses) on one half and is judged on the other. A classifier that chooses the direction itself
chooses by chance where there is nothing to find: on MNIST (AUC 0.50 to 0.51 on R-Set) logistic regression on loss,
confidence and entropy called all of a forgotten class members, of the retrained model too.

``auc`` and ``tpr_at_1pct_fpr`` compare a subset's members with non-members of its own kind: for a forgotten class the
test samples of that class, otherwise the test samples that the attack has not learned from (``entropy_svm``: those that
it has).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from qdsim import plugins, seeds
from qdsim.data.forgetting import UnlearningRequest, View
from qdsim.errors import BadInput
from qdsim.federation import evaluation
from qdsim.federation.attacks import ATTACKS, ENTROPY_SVM, LOSS_THRESHOLD, Attack, find
from qdsim.federation.executor import Executor
from qdsim.federation.measures import FEATURES
from qdsim.models.params import Params

FEWEST = 4
"""Fewer members or others than this and there is nothing to learn from."""
MOST_OF_A_KIND = 5_000
"""Samples of each kind in the attack by loss, half of them to learn from."""
MOST_IN_ALL = 10_000
"""Samples that the attack by entropy learns from."""
MADE_UP = 200
"""Samples of each kind on which an attack from outside is tried."""
LOW_RATE = 0.01
TAIL = 0.05
LOSS, ENTROPY = FEATURES.index("loss"), FEATURES.index("entropy")

Row = dict[str, float | str | None]


@dataclass(frozen=True)
class SampleSizes:
    """How many samples of each kind an attack looks at."""

    members: int
    others: int
    forget: int
    forget_others: int


@dataclass(frozen=True)
class AttackFeatures:
    """Features of the drawn samples, float64 (n, 2) each."""

    members: np.ndarray
    """Of D without D_f."""
    others: np.ndarray
    """Of the test set; for a class request without the forgotten classes, but in the attack by entropy."""
    forget: np.ndarray
    """Of D_f."""
    forget_others: np.ndarray
    """Test samples of the forgotten class; empty at client level, where ``others`` serve."""


def attack(
    name: str,
    request: UnlearningRequest,
    run_seed: int,
    labels: Sequence[np.ndarray],
    test_labels: np.ndarray,
    params: Params,
    executor: Executor,
) -> list[Row]:
    """Attack an unlearned model. The samples depend on seed and request, so every method faces the same ones.

    ``labels`` are those of each client's samples, ``test_labels`` those of the test set.
    """
    retained = View("real", without=request.forgotten)
    forgotten = View("real", only=request.forget, without=request.previously_forgotten)
    inside, forget = (_owned(view, labels) for view in (retained, forgotten))
    # the attack by entropy knows nothing of what was forgotten: all test samples are "not members" to it
    outside = np.arange(len(test_labels))
    if name != ENTROPY_SVM.name:
        outside = outside[~np.isin(test_labels, list(request.forgotten.classes))]
    of_class = np.flatnonzero(np.isin(test_labels, list(request.forget.classes)))
    sizes = sample_sizes(name, len(inside), len(outside), len(forget), len(of_class))
    if min(sizes.members, sizes.others) < FEWEST or not sizes.forget:
        return []
    rng = seeds.numpy_generator(run_seed, find(name).seed_purpose, request=request.label)

    def of_clients(candidates: np.ndarray, count: int) -> np.ndarray:
        chosen = candidates[np.sort(rng.choice(len(candidates), count, replace=False))]
        positions = {int(i): chosen[chosen[:, 0] == i, 1] for i in np.unique(chosen[:, 0])}
        return evaluation.client_features(executor, params, positions)[rng.permutation(count)]

    def of_test(candidates: np.ndarray, count: int) -> np.ndarray:
        return evaluation.test_features(executor, params, rng.choice(candidates, count, replace=False))

    features = AttackFeatures(
        members=of_clients(inside, sizes.members),
        others=of_test(outside, sizes.others),
        forget=of_clients(forget, sizes.forget),
        forget_others=of_test(of_class, sizes.forget_others) if sizes.forget_others else np.empty((0, len(FEATURES))),
    )
    return run(name, features)


def _owned(view: View, labels: Sequence[np.ndarray]) -> np.ndarray:
    """Return (client, position in its shard) of every sample in a view, int64 (n, 2)."""
    found = [np.empty((0, 2), np.int64)]
    for client_id, own in enumerate(labels):
        positions = np.flatnonzero(view.mask(client_id, own))
        found.append(np.stack([np.full(len(positions), client_id), positions], axis=1))
    return np.concatenate(found)


def sample_sizes(attack: str, members: int, others: int, forget: int, forget_others: int) -> SampleSizes:
    """Say how many to draw of what there is."""
    if attack == ENTROPY_SVM.name:
        share = min(1.0, MOST_IN_ALL / (members + others))
        members, others = round(share * members), round(share * others)
    else:
        members = others = min(MOST_OF_A_KIND, members, others) // 2 * 2
    return SampleSizes(members, others, min(MOST_OF_A_KIND, forget), min(MOST_OF_A_KIND, forget_others))


def run(attack: str, features: AttackFeatures) -> list[Row]:
    """Attack, and return a row for each subset."""
    found = find(attack)
    if found.judge is None:
        return (_entropy_svm if attack == ENTROPY_SVM.name else _loss_threshold)(features)
    with plugins.calling("membership", attack, "its judge"):
        rows = [_checked_row(found, row) for row in found.judge(features)]
        subsets = [row["subset"] for row in rows]
        if sorted(map(str, subsets)) != ["forget", "retain"]:
            raise ValueError(f"its rows are of {subsets}; wanted is one of forget and one of retain")
    return rows


def check_attack(name: str, kinds: Collection[str]) -> None:
    """Have an attack from outside judge made-up features before anything runs: hours of training come before the real.

    Members' losses and entropies are smaller than others'. ``kinds`` are those of the job's requests: for a client
    there are no test samples of the forgotten kind.
    """
    if name in ATTACKS:
        return
    judge = find(name).judge
    assert judge is not None  # it has been found
    why = plugins.misfit(judge, None)
    if why:
        raise BadInput("membership", name, f"its judge: {why}; wanted is judge(features)")
    rng = np.random.default_rng(0)
    inside, outside = (scale * rng.exponential(size=(MADE_UP, len(FEATURES))) for scale in (0.5, 1.0))
    for kind in kinds:
        own = outside[:0] if kind == "client" else outside.copy()
        run(name, AttackFeatures(inside, outside, inside.copy(), own))


def _checked_row(attack: Attack, row: Row) -> Row:
    """Return a row of an attack from outside as the table has it."""
    if row["subset"] not in ("forget", "retain"):
        raise ValueError(f"a row's subset is {row['subset']!r}; allowed: forget, retain")
    numbers = {name: float(row[name]) for name in ("member_rate", "auc", "tpr_at_1pct_fpr")}  # type: ignore[arg-type]
    return {"attack": attack.name, "subset": row["subset"], **numbers}


def _entropy_svm(features: AttackFeatures) -> list[Row]:
    members, others, forget, forget_others = (
        array[:, [ENTROPY]] for array in (features.members, features.others, features.forget, features.forget_others)
    )
    from sklearn.svm import SVC  # a second to import, which runs without attacks need not wait for

    machine = SVC(C=3, gamma="auto", kernel="rbf")
    machine.fit(np.concatenate([members, others]), _labels(members, others))
    own_kind = forget_others if len(forget_others) else others

    def row(subset: str, inside: np.ndarray, outside: np.ndarray) -> Row:
        rate = float(machine.predict(inside).mean())
        return _row(ENTROPY_SVM, subset, rate, machine.decision_function(inside), machine.decision_function(outside))

    return [row("forget", forget, own_kind), row("retain", members, others)]


def _loss_threshold(features: AttackFeatures) -> list[Row]:
    members, others, forget, forget_others = (
        array[:, LOSS] for array in (features.members, features.others, features.forget, features.forget_others)
    )
    half = len(members) // 2
    threshold = learn_threshold(members[:half], others[:half])
    held_in, held_out = members[half:], others[half:]
    own_kind = forget_others if len(forget_others) else held_out

    def row(subset: str, inside: np.ndarray, outside: np.ndarray) -> Row:
        return _row(LOSS_THRESHOLD, subset, float((inside <= threshold).mean()), -inside, -outside)

    return [row("forget", forget, own_kind), row("retain", held_in, held_out)]


def learn_threshold(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the loss up to which most members and fewest others lie, within the middle 90 % of all losses."""
    from sklearn.metrics import roc_curve

    losses = np.concatenate([inside, outside])
    lowest, highest = np.quantile(losses, [TAIL, 1 - TAIL])
    false_rate, true_rate, scores = roc_curve(_labels(inside, outside), -losses, drop_intermediate=False)
    inner = (-scores >= lowest) & (-scores <= highest)
    return float(-scores[inner][np.argmax((true_rate - false_rate)[inner])])


def _labels(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ones(len(inside), int), np.zeros(len(outside), int)])


def _row(attack: Attack, subset: str, rate: float, inside: np.ndarray, outside: np.ndarray) -> Row:
    """``inside`` and ``outside`` are scores, higher for members."""
    from sklearn.metrics import roc_auc_score, roc_curve

    truth, score = _labels(inside, outside), np.concatenate([inside, outside])
    false_rate, true_rate, _ = roc_curve(truth, score)
    return {
        "attack": attack.name,
        "subset": subset,
        "member_rate": rate,
        "auc": float(roc_auc_score(truth, score)),
        "tpr_at_1pct_fpr": float(true_rate[false_rate <= LOW_RATE].max()),
    }
