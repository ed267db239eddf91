"""What only the data can refuse is refused before anything starts."""

import numpy as np
import pytest

from qdsim.data import datasets
from qdsim.data.forgetting import ForgetSet
from qdsim.errors import BadInput
from qdsim.experiment import config
from qdsim.experiment.plan import build_plan

DIGITS = datasets.load("digits", "")


def plan_of(dataset=DIGITS, **changes):
    values = {"name": "t", "seeds": [0], "model": {"width": 4, "depth": 2}, **changes}
    (point,) = build_plan(config.validate(values), dataset).points
    return point


def requests(*targets, kind="class"):
    return [{"kind": kind, "target": t} for t in targets]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"requests": requests(12)}, r"requests\[0\].target = 12: classes of digits are numbered 0 to 9"),
        ({"model": {"depth": 4}}, r"model.depth = 4: 8x8 images allow a depth of 3 at most"),
        ({"partition": {"clients": 2000}}, r"partition.clients = 2000: 1437 samples allow at most 143 clients of 10"),
        ({"requests": requests(*range(10)), "sequence": False, "partition": {"min_size": 500}}, "partition"),
    ],
)
def test_impossible_jobs_are_refused(changes, text):
    """Key, value, and what is allowed."""
    with pytest.raises(BadInput, match=text):
        plan_of(**changes)


def test_classes_go_by_their_names():
    """``dog`` is CIFAR-10's class 5; the digits' names are theirs; the tables have the number."""
    cifar = datasets.stand_in("cifar10")
    few = {"partition": {"clients": 2}}
    (federation,) = plan_of(cifar, requests=requests("dog", 3, "random"), **few).federations
    assert [request.label for request in federation.requests[:2]] == ["class:5", "class:3"]
    assert federation.requests[2].label not in ("class:5", "class:3")
    (federation,) = plan_of(requests=requests("9")).federations
    assert federation.requests[0].label == "class:9"
    with pytest.raises(
        BadInput, match=r"requests\[0\].target = 'dgo': no class of cifar10: its classes are airplane, a"
    ):
        plan_of(cifar, requests=requests("dgo"), **few)
    with pytest.raises(BadInput, match=r"requests\[1\].target = 'dog': class 5 is listed before"):
        plan_of(cifar, requests=requests(5, "dog"), **few)
    from dataclasses import replace

    with pytest.raises(BadInput, match="its classes have numbers only"):
        plan_of(replace(DIGITS, class_names=()), requests=requests("9"))


def without_class(c):
    kept = DIGITS.train_labels != c
    from dataclasses import replace

    return replace(DIGITS, train_images=DIGITS.train_images[kept], train_labels=DIGITS.train_labels[kept])


def test_a_class_that_nobody_has_is_refused():
    """The test set knows class 9, no client does."""
    with pytest.raises(BadInput, match=r"requests\[0\].target = 9: no client has a training sample"):
        plan_of(without_class(9))


def test_a_single_request_that_leaves_no_data_is_refused_but_the_last_of_a_sequence_is_not():
    """All training samples are of class 3: alone it is refused; as the end of a sequence it is allowed."""
    from dataclasses import replace

    kept = np.isin(DIGITS.train_labels, [3, 4])
    two = replace(DIGITS, train_images=DIGITS.train_images[kept], train_labels=DIGITS.train_labels[kept])
    only = DIGITS.train_labels == 3
    one = replace(DIGITS, train_images=DIGITS.train_images[only], train_labels=DIGITS.train_labels[only])
    with pytest.raises(BadInput, match="forgetting class:3 would leave no data"):
        plan_of(one, requests=requests(3), partition={"min_size": 1, "clients": 3})
    plan = plan_of(two, requests=requests(4, 3), sequence=True, partition={"min_size": 1, "clients": 3})
    last = plan.federations[0].requests[1]
    assert [p.name for p in plan.phases("quickdrop", plan.federations[0], last)] == ["unlearn"]
    assert plan.phases("retrain", plan.federations[0], last) == []


def test_independent_requests_know_nothing_of_each_other():
    """Labels without position, nothing forgotten earlier."""
    resolved = plan_of(requests=requests(9, 3)).federations[0].requests
    assert [b.label for b in resolved] == ["class:9", "class:3"]
    assert all(b.previously_forgotten == ForgetSet() for b in resolved)


def test_a_sequence_accumulates():
    """Positions in the labels; the third request keeps the first two out; nothing is relearned."""
    plan = plan_of(requests=requests(9, 3, 1), sequence=True)
    resolved = plan.federations[0].requests
    assert [b.label for b in resolved] == ["1:class:9", "2:class:3", "3:class:1"]
    assert resolved[2].previously_forgotten.classes == {9, 3}
    assert [p.name for p in plan.phases("quickdrop", plan.federations[0], resolved[2])] == ["unlearn", "recover"]


def test_random_targets_are_drawn_per_seed_and_never_twice():
    """Three random clients of ten are distinct, the same for the same seed, and others for another."""
    random = requests("random", "random", "random", kind="client")
    first, second = (plan_of(requests=random, seeds=[0, 1]).federations for _ in range(2))
    assert [b.label for b in first[0].requests] == [b.label for b in second[0].requests]
    assert len({b.label for b in first[0].requests}) == 3
    drawn = {tuple(b.label for b in s.requests) for s in plan_of(requests=random, seeds=list(range(6))).federations}
    assert len(drawn) > 1


def test_each_seed_has_its_own_partition_unless_one_is_fixed():
    """partition.seed makes all seeds share one split; official does so by default."""
    own = plan_of(seeds=[0, 1]).federations
    assert own[0].partition.sha256 != own[1].partition.sha256
    for fixed in ({"seed": 5}, {"kind": "official", "min_size": 1}):
        same = plan_of(seeds=[0, 1], partition=fixed).federations
        assert same[0].partition.sha256 == same[1].partition.sha256


def test_without_a_method_that_distils_training_is_plain_fedavg():
    """methods = [retrain]: no synthetic sets are made."""
    plan = plan_of(methods=["retrain"])
    assert not plan.distils
    assert [p.name for p in plan.training()] == ["train"]
