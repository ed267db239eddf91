"""Which samples membership inference looks at, and their features fetched from where the samples are."""

import numpy as np

from qdsim import membership, seeds
from qdsim.evaluation import FEATURES
from qdsim.federation import Executor
from qdsim.forgetting import View
from qdsim.membership import Seen
from qdsim.params import Params
from qdsim.plan import Task

FEWEST = 4
"""Fewer members or others than this and there is nothing to learn from."""


def attack(name: str, task: Task, test_labels: np.ndarray, params: Params, executor: Executor) -> list[membership.Row]:
    """Attack an unlearned model. The samples depend on seed and request, so every method faces the same ones."""
    branch, seed_plan = task.branch, task.seed_plan
    retained = View("real", without=branch.gone)
    forgotten = View("real", only=branch.forget, without=branch.earlier)
    inside, forget = (_owned(view, seed_plan.labels) for view in (retained, forgotten))
    # the literal attack knows nothing of what was forgotten: all test samples are "not members" to it
    outside = np.arange(len(test_labels))
    if name != "literal":
        outside = outside[~np.isin(test_labels, list(branch.gone.classes))]
    of_class = np.flatnonzero(np.isin(test_labels, list(branch.forget.classes)))
    sizes = membership.sample_sizes(name, len(inside), len(outside), len(forget), len(of_class))
    if min(sizes.members, sizes.others) < FEWEST or not sizes.forget:
        return []
    rng = seeds.numpy_generator(seed_plan.seed, f"membership-{name}", request=branch.label)

    def of_clients(candidates: np.ndarray, count: int) -> np.ndarray:
        chosen = candidates[np.sort(rng.choice(len(candidates), count, replace=False))]
        positions = {int(i): chosen[chosen[:, 0] == i, 1] for i in np.unique(chosen[:, 0])}
        return executor.own_features(params, positions)[rng.permutation(count)]

    def of_test(candidates: np.ndarray, count: int) -> np.ndarray:
        return executor.test_features(params, rng.choice(candidates, count, replace=False))

    seen = Seen(
        members=of_clients(inside, sizes.members),
        others=of_test(outside, sizes.others),
        forget=of_clients(forget, sizes.forget),
        forget_others=of_test(of_class, sizes.forget_others) if sizes.forget_others else np.empty((0, len(FEATURES))),
    )
    return membership.run(name, seen)


def _owned(view: View, labels: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return (client, position in its shard) of every sample in a view, int64 (n, 2)."""
    found = [np.empty((0, 2), np.int64)]
    for client_id, own in enumerate(labels):
        positions = np.flatnonzero(view.mask(client_id, own))
        found.append(np.stack([np.full(len(positions), client_id), positions], axis=1))
    return np.concatenate(found)
