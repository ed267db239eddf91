"""Membership inference: at chance on a model that knows nothing, sure on one that has learned by heart."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from qdsim.algorithms.local_sgd import batches, summed_gradient
from qdsim.data.clients import normalize
from qdsim.data.datasets import Dataset, Normalization
from qdsim.experiment import plan
from qdsim.experiment.config import validate
from qdsim.federation import membership
from qdsim.federation.attacks import ATTACKS
from qdsim.federation.client_host import ClientHost, Images, Shard
from qdsim.federation.executor import InlineExecutor
from qdsim.federation.measures import features
from qdsim.federation.membership import AttackFeatures, sample_sizes
from qdsim.models import params
from qdsim.models.compute import Compute
from tests.runs import TINY

PIXELS = Normalization((0.5,), (0.29,))


def noise(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels that have nothing to do with each other: only learning by heart helps."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (samples, 1, 8, 8), dtype=np.uint8), rng.integers(0, 10, samples)


def federation(samples: int):
    """Two clients and a test set of noise; return the first task, an executor, and what trains on."""
    train, test = noise(samples, 1), noise(samples, 2)
    dataset = Dataset("noise", *train, *test, num_classes=10, normalization=PIXELS)
    job = validate({**TINY, "model": {"width": 32, "depth": 2}, "partition": {"kind": "iid", "clients": 2}})
    made = plan.build_plan(job, dataset)
    task = made.tasks()[0]
    compute = Compute(task.point.model, torch.device("cpu"), 32)
    host = ClientHost(compute, Images(train[0], test[0], test[1], PIXELS))
    parts = zip(task.federation.partition.indices, task.federation.labels, strict=True)
    host.assign_clients(task.point.model, 0, [Shard(i, rows, labels) for i, (rows, labels) in enumerate(parts)], None)
    return task, InlineExecutor(host), compute, train, test


def learn_by_heart(compute, images, labels, steps=400):
    """SGD on the same few samples until the loss is gone."""
    theta = compute.model.init(torch.Generator().manual_seed(0))
    x = normalize(torch.from_numpy(images), PIXELS, torch.float32)
    y = torch.from_numpy(labels)
    for chosen in batches(len(labels), 64, steps, torch.Generator().manual_seed(1)):
        _, gradient = summed_gradient(compute, theta, x[chosen], y[chosen])
        params.step_(theta, gradient, -0.1 / len(chosen))
    return theta


def attacked(name, task, test_labels, theta, executor):
    at = task.federation
    return membership.attack(name, task.request, at.seed, at.labels, test_labels, theta, executor)


@pytest.mark.parametrize("name", ["loss_threshold", "entropy_svm"])
def test_an_untrained_model_tells_nothing(name):
    """AUC within 0.5 ± 0.03 on R-Set and on F-Set (a tenth of 20,000 samples is of the class)."""
    task, executor, compute, _, test = federation(20_000)
    theta = compute.model.init(torch.Generator().manual_seed(0))
    found = {row["subset"]: row for row in attacked(name, task, test[1], theta, executor)}
    assert found["retain"]["auc"] == pytest.approx(0.5, abs=0.03)
    assert found["forget"]["auc"] == pytest.approx(0.5, abs=0.03)
    assert found["retain"]["tpr_at_1pct_fpr"] < 0.04


@pytest.mark.parametrize("name", ["loss_threshold", "entropy_svm"])
def test_a_model_that_has_learned_by_heart_gives_its_samples_away(name):
    """300 samples of noise with random labels, learned to the end: AUC above 0.8 on R-Set and on F-Set."""
    task, executor, compute, train, test = federation(300)
    theta = learn_by_heart(compute, *train)
    found = {row["subset"]: row for row in attacked(name, task, test[1], theta, executor)}
    assert found["retain"]["auc"] > 0.8
    assert found["forget"]["auc"] > 0.8


def test_features_by_hand():
    """All weights zero: every class has 1/10, so the loss and the entropy are ln 10."""
    _, _, compute, train, _ = federation(40)
    theta = {n: torch.zeros_like(t) for n, t in compute.model.init(torch.Generator().manual_seed(0)).items()}
    found = features(compute, theta, train[0], PIXELS, np.arange(5), train[1][:5])
    assert found == pytest.approx(np.tile([math.log(10), math.log(10)], (5, 1)))


def test_how_many_samples_are_drawn():
    """By loss: as many of either kind, an even number, 5,000 at most; by entropy: 10,000 in all with the ratio kept."""
    assert sample_sizes("loss_threshold", 45_000, 9_000, 5_000, 1_000) == membership.SampleSizes(5000, 5000, 5000, 1000)
    assert sample_sizes("loss_threshold", 301, 77, 20, 0) == membership.SampleSizes(76, 76, 20, 0)
    assert sample_sizes("entropy_svm", 45_000, 10_000, 5_000, 1_000) == membership.SampleSizes(8182, 1818, 5000, 1000)
    assert sample_sizes("entropy_svm", 300, 100, 20, 0) == membership.SampleSizes(300, 100, 20, 0)


def test_the_seeds_of_the_draws_never_change():
    """They have the words of schema version 3: another purpose, other samples, and every number moves."""
    purposes = {name: attack.seed_purpose for name, attack in ATTACKS.items()}
    assert purposes == {"loss_threshold": "membership-balanced", "entropy_svm": "membership-literal"}


def test_the_samples_are_drawn_with_that_seed(monkeypatch):
    """What the attack asks the generators for, of each attack once."""
    task, executor, compute, _, test = federation(200)
    theta = compute.model.init(torch.Generator().manual_seed(0))
    asked = []
    real = membership.seeds.numpy_generator

    def listening(run_seed, purpose, **named):
        asked.append(purpose)
        return real(run_seed, purpose, **named)

    monkeypatch.setattr(membership.seeds, "numpy_generator", listening)
    for name in ATTACKS:
        rows = attacked(name, task, test[1], theta, executor)
        assert [row["attack"] for row in rows] == [name, name]
    assert asked == ["membership-balanced", "membership-literal"]


def of_losses(*losses):
    """Return features of samples with these losses; the entropy follows them."""
    loss = np.array(losses, dtype=float)
    return np.stack([loss, loss], axis=1)


def test_rates_by_hand():
    """Members have loss 0.1, others 2; F-Set looks like the others but for one sample of ten: a rate of 0.1."""
    inside, outside = of_losses(*[0.1] * 40), of_losses(*[2.0] * 40)
    seen = AttackFeatures(inside, outside, of_losses(0.1, *[2.0] * 9), of_losses(*[2.0] * 10))
    for name in ("loss_threshold", "entropy_svm"):
        forget, retain = membership.run(name, seen)
        assert (forget["subset"], retain["subset"]) == ("forget", "retain")
        assert forget["member_rate"] == pytest.approx(0.1)
        # one of ten above all others, nine tied with them: AUC = 0.1 + 0.9 / 2; found without a false alarm: 0.1
        assert forget["auc"] == pytest.approx(0.55)
        assert forget["tpr_at_1pct_fpr"] == pytest.approx(0.1)
        assert (retain["member_rate"], retain["auc"], retain["tpr_at_1pct_fpr"]) == (1.0, 1.0, 1.0)


def test_the_threshold_by_hand():
    """Members 1, 2, 3, 10 and others 4, 5, 6, 7: up to 3 lie three of four members and no other."""
    assert membership.learn_threshold(np.array([1.0, 2, 3, 10]), np.array([4.0, 5, 6, 7])) == 3


def test_where_there_is_nothing_to_find_a_lost_sample_is_still_no_member():
    """Members have the higher losses, so every threshold is worse than none: one within the middle 90 % is taken."""
    rng = np.random.default_rng(0)
    inside, outside = of_losses(*rng.uniform(1, 2, 400)), of_losses(*rng.uniform(0, 1, 400))
    seen = AttackFeatures(inside, outside, of_losses(*[9.0] * 10), of_losses(*[9.0] * 10))
    forget, retain = membership.run("loss_threshold", seen)
    assert forget["member_rate"] == 0
    assert retain["auc"] == 0


def test_at_client_level_the_other_test_samples_stand_for_non_members():
    """No test sample belongs to a client."""
    seen = AttackFeatures(of_losses(*[0.1] * 40), of_losses(*[2.0] * 40), of_losses(*[2.0] * 10), np.empty((0, 2)))
    assert membership.run("loss_threshold", seen)[0]["auc"] == 0.5


def test_the_label_matters_to_the_attack_by_loss_alone():
    """Sure and wrong: entropy takes it for a member, the loss does not."""
    inside, outside = of_losses(*[0.1] * 40), of_losses(*[2.0] * 40)
    wrong = np.tile([6.0, 0.1], (10, 1))
    seen = AttackFeatures(inside, outside, wrong, of_losses(*[2.0] * 10))
    assert membership.run("loss_threshold", seen)[0]["member_rate"] == 0.0
    assert membership.run("entropy_svm", seen)[0]["member_rate"] == 1.0


def test_every_method_faces_the_same_samples():
    """The draw depends on seed and request: another method's task gives the same rows for the same model."""
    task, executor, compute, _, test = federation(200)
    theta = compute.model.init(torch.Generator().manual_seed(0))
    other = replace(task, method="retrain")
    assert attacked("loss_threshold", task, test[1], theta, executor) == attacked(
        "loss_threshold", other, test[1], theta, executor
    )
