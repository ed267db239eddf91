"""QuickDrop: matching beside FedAvg, and what each phase may touch."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from qdsim.algorithms import distillation, fedavg, local_sgd, quickdrop, retrain
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import RoundContext
from qdsim.data.forgetting import ForgetSet, UnlearningRequest, View
from qdsim.models import params as P
from tests.algorithms.settings import HYPER, PLAIN, STAGE
from tests.conftest import CTX, make_client, make_compute

LABELS = {0: [0] * 9 + [1] * 4, 1: [1] * 3 + [2] * 8, 2: [0, 2, 2, 2]}


def federation(settings=PLAIN, dtype=torch.float32):
    clients = {}
    for i, labels in LABELS.items():
        client = make_client(i, labels)
        pick = torch.Generator().manual_seed(i)
        clients[i] = replace(client, synthetic=distillation.initial_set(client, settings, pick, dtype))
    return clients


def train(step, clients, dtype=torch.float32, rounds=3):
    """Run FedAvg rounds by hand; return θ and the clients."""
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0), dtype)
    for round_number in range(1, rounds + 1):
        ctx = RoundContext(0, "", "train", round_number)
        updates = []
        for i in clients:
            clients[i], update = step(clients[i], params, ctx=ctx, compute=compute)
            updates.append(update)
        params = fedavg.server_step(params, updates, ctx)
    return params, clients


@pytest.mark.parametrize(
    "changes", [{"lr": 0.0}, {"lr": 5.0}, {"steps": 3}, {"batch": 2}, {"momentum": 0.0}, {"init": "noise"}]
)
def test_no_synthetic_setting_touches_the_models_trajectory(changes):
    """Any η_S, 0 included, ς_S, |B^S|, momentum or initialisation: the same bits after three rounds."""
    plain, _ = train(partial(quickdrop.train, stage=STAGE, distillation=PLAIN), federation())
    settings = replace(PLAIN, **changes)
    other, _ = train(partial(quickdrop.train, stage=STAGE, distillation=settings), federation(settings))
    assert P.sha256(plain) == P.sha256(other)


def test_training_with_matching_is_fedavg():
    """Float64, three rounds: within 1e-10 of plain FedAvg, whose batch gradient is computed in one piece."""
    wide = partial(federation, PLAIN, torch.float64)
    ours, _ = train(partial(quickdrop.train, stage=STAGE, distillation=PLAIN), wide(), torch.float64)
    theirs, _ = train(partial(local_sgd.run, stage=STAGE, view=View("real")), wide(), torch.float64)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-10)


def test_the_synthetic_set_persists_and_moves_with_its_learning_rate():
    """η_S = 0 leaves every pixel; otherwise round two begins where round one ended."""
    still = replace(PLAIN, lr=0.0)
    start = federation()
    _, frozen = train(partial(quickdrop.train, stage=STAGE, distillation=still), federation())
    assert all(torch.equal(frozen[i].synthetic.images, start[i].synthetic.images) for i in start)
    step = partial(quickdrop.train, stage=STAGE, distillation=PLAIN)
    _, once = train(step, federation(), rounds=1)
    _, twice = train(step, federation(), rounds=2)
    for i in start:
        assert not torch.equal(once[i].synthetic.images, start[i].synthetic.images)
        assert not torch.equal(twice[i].synthetic.images, once[i].synthetic.images)
        assert (twice[i].synthetic.labels == start[i].synthetic.labels).all()


def test_a_training_step_leaves_its_inputs_alone():
    """The old state is untouched, so a step that fails half-way leaves nothing behind."""
    client = federation()[0]
    before = client.synthetic.images.clone()
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0))
    digest = P.sha256(params)
    after, update = quickdrop.train(client, params, stage=STAGE, distillation=PLAIN, ctx=CTX, compute=compute)
    assert torch.equal(client.synthetic.images, before)
    assert P.sha256(params) == digest
    assert after.synthetic is not client.synthetic
    assert (update.gradients, update.samples, update.num_samples) == (4, 24, 13)
    assert update.matching_s > 0


def test_synthetic_batches_hold_the_given_classes_and_no_more_than_allowed():
    """Of 3 + 2 + 4 images, classes 0 and 2: all 7; at most 4 in all: a subset, by class, drawn anew."""
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])
    everything = quickdrop.synthetic_rows(labels, [0, 2], 256, torch.Generator())
    assert {c: rows.tolist() for c, rows in everything.items()} == {0: [0, 1, 2], 2: [5, 6, 7, 8]}
    generator = torch.Generator().manual_seed(0)
    drawn = [quickdrop.synthetic_rows(labels, [0, 1, 2], 4, generator) for _ in range(20)]
    assert all(sum(len(rows) for rows in found.values()) == 4 for found in drawn)
    assert len({str(found) for found in drawn}) > 1
    for found in drawn:
        assert all((labels[rows] == c).all() for c, rows in found.items())


def request(**changes):
    return UnlearningRequest("class:2", ForgetSet(classes=frozenset([2])), **changes)


def labels_of(view, clients):
    found = set()
    for client in clients.values():
        samples = client.samples(view)
        if len(samples):
            found |= set(samples.batch(np.arange(len(samples)), torch.device("cpu"), torch.float32)[1].tolist())
    return found


def test_phases_of_a_class_request():
    """Unlearn on S^2 alone, recover on the rest with real samples beside, relearn on both or on S^2 alone."""
    clients = federation()
    unlearn, recover, relearn = quickdrop.phases(HYPER, None, request(), History())
    assert [p.name for p in (unlearn, recover, relearn)] == ["unlearn", "recover", "relearn"]
    assert (unlearn.view.source, recover.view.source) == ("synthetic", "augmented")
    assert labels_of(unlearn.view, clients) == {2}
    assert labels_of(recover.view, clients) == {0, 1}
    assert labels_of(relearn.view, clients) == {0, 1, 2}
    for client in clients.values():
        samples = client.samples(relearn.view)
        assert len(samples.real) == 0, "what was forgotten is relearned from synthetic samples alone"
        assert len(samples.synthetic) == len(client.synthetic.labels)
    assert unlearn.client_step.keywords["ascend"]
    assert unlearn.client_step.keywords["max_loss"] == 5.0
    alone = quickdrop.phases(replace(HYPER, relearn=replace(HYPER.relearn, data="forget")), None, request(), History())[
        2
    ]
    assert labels_of(alone.view, clients) == {2}
    assert alone.view.source == "synthetic"


def test_a_class_forgotten_earlier_stays_out_of_every_later_phase():
    """Class 0 went first: neither unlearning, recovery nor relearning for class 2 sees it again."""
    clients = federation()
    later = request(previously_forgotten=ForgetSet(classes=frozenset([0])))
    seen = [labels_of(phase.view, clients) for phase in quickdrop.phases(HYPER, None, later, History())]
    assert seen == [{2}, {1}, {1, 2}]
    assert labels_of(retrain.phases(HYPER, None, later, History())[0].view, clients) == {1}


def test_a_client_request_concerns_one_client_then_all_others():
    """Client 1 alone ascends, the others recover, and nobody but the others retrains."""
    one = UnlearningRequest("client:1", ForgetSet(clients=frozenset([1])))
    clients = federation()

    def holders(phase):
        return [i for i, client in clients.items() if len(client.samples(phase.view))]

    unlearn, recover, relearn = quickdrop.phases(HYPER, None, one, History())
    assert (holders(unlearn), holders(recover), holders(relearn)) == ([1], [0, 2], [0, 1, 2])
    again, relearn = retrain.phases(HYPER, None, one, History())
    assert holders(relearn) == [0, 1, 2]
    assert relearn.start == "current"
    assert holders(again) == [0, 2]
    assert again.start == "fresh"
    assert again.view.source == "real"


def test_recovery_mixes_real_and_synthetic_one_to_one():
    """|Z_i| doubles with augmentation; the real ones are those drawn at the beginning."""
    client = federation()[0]
    plain = quickdrop.phases(replace(HYPER, recover=replace(HYPER.recover, augment=False)), None, request(), History())[
        1
    ]
    mixed = quickdrop.phases(HYPER, None, request(), History())[1]
    assert len(client.samples(plain.view)) * 2 == len(client.samples(mixed.view)) == 10
    real = client.samples(mixed.view).real
    assert set(real) <= set(client.synthetic.extra)


def test_finetuning_follows_training_one_network_a_round():
    """F = 7: a phase of 7 rounds after training; F = 0: none; matching off: plain FedAvg."""
    with_f = quickdrop.training(replace(HYPER, synthetic=replace(PLAIN, finetune=7)))
    assert [(p.name, p.stage.rounds) for p in with_f] == [("train", 3), ("finetune", 7)]
    assert [p.name for p in quickdrop.training(HYPER)] == ["train"]
    plain = quickdrop.training(replace(HYPER, synthetic=replace(PLAIN, matching=False)))[0]
    assert plain.client_step.func is local_sgd.run
