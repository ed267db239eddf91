"""The round loop on toy steps, and how the test set is cut."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from qdsim.algorithms import fedavg
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import Assignment, ClientUpdate, Phase
from qdsim.algorithms.settings import Stage
from qdsim.data.forgetting import Branch, ForgetSet, View
from qdsim.errors import ClientFailed, Diverged
from qdsim.federation.client_host import ClientHost, Images, Shard
from qdsim.federation.evaluation import BATCH, Counts, count_correct
from qdsim.federation.rounds import InlineExecutor, Looked, pieces, run_rounds
from qdsim.models.params import Params
from tests.algorithms.settings import PLAIN
from tests.conftest import make_client, make_compute

LABELS = {0: [0, 0, 1], 1: [1, 1, 1, 2], 2: [2]}


def host() -> ClientHost:
    compute = make_compute()
    labels = np.concatenate([LABELS[i] for i in LABELS])
    source = make_client(9, labels.tolist())
    images = Images(source.pool, source.pool, labels, source.pixels)
    made = ClientHost(compute, images, node_id="n", gpu_id="g")
    starts = np.cumsum([0, *[len(LABELS[i]) for i in LABELS]])
    shards = [Shard(i, np.arange(starts[i], starts[i + 1]), np.array(LABELS[i])) for i in LABELS]
    made.adopt(compute.model, 0, shards, None)
    return made


def add_size(client, params, *, names, compute):
    """Return θ + |D_i| + round as an update: sums one can do by hand."""
    delta = {"w": torch.tensor([float(len(client.labels) + names.round_number)])}
    return client, ClientUpdate(client.client_id, len(client.labels), delta, loss=0.5, gradients=1, samples=3)


def phase(step=add_size, rounds=2, participation=1.0) -> Phase:
    stage = Stage(rounds, 1, 1, 0.1, participation)
    return replace(fedavg.phase("train", stage, View("real")), client_step=step)


def test_two_rounds_by_hand():
    """Sizes 3, 4, 1: round 1 adds (3·4 + 4·5 + 1·2) / 8 = 4.25, round 2 one more: θ = 4.25, then 9.5."""
    sizes = np.array([3, 4, 1])
    done: list[tuple[int, int, int]] = []
    start: Params = {"w": torch.tensor([0.0])}
    executor = InlineExecutor(host())
    results = list(run_rounds(phase(), start, sizes, executor, 0, "", lambda *where: done.append(where)))
    assert [r.params["w"].item() for r in results] == pytest.approx([4.25, 9.5])
    assert [r.round_number for r in results] == [1, 2]
    assert [u.client_id for u in results[0].updates] == [0, 1, 2]
    assert all(u.delta == {} and u.bytes_up == 4 and u.node_id == "n" and u.gpu_id == "g" for u in results[0].updates)
    assert (results[0].bytes_down, results[0].expected) == (12, 3)
    assert done == [(1, 3, 1), (1, 3, 2), (1, 3, 3), (2, 3, 1), (2, 3, 2), (2, 3, 3)]
    assert start["w"].item() == 0.0


def test_clients_without_data_take_no_part():
    """With sizes 3, 0, 1 client 1 is not asked."""
    results = run_rounds(phase(), {"w": torch.zeros(1)}, np.array([3, 0, 1]), InlineExecutor(host()), 0, "", print)
    assert [u.client_id for u in next(results).updates] == [0, 2]


def test_a_client_that_diverges_stops_the_run_and_is_named():
    """Nobody is left out of an average in silence."""

    def diverge(client, params, *, names, compute):
        if client.client_id == 1:
            raise Diverged("loss inf")
        return add_size(client, params, names=names, compute=compute)

    rounds = run_rounds(
        phase(diverge), {"w": torch.zeros(1)}, np.array([3, 4, 1]), InlineExecutor(host()), 0, "", print
    )
    with pytest.raises(ClientFailed, match="client 1 failed in train, round 1, on this machine: Diverged: loss inf"):
        next(rounds)


def test_a_failed_step_leaves_the_state_as_it_was():
    """The host keeps the old client when the step raises."""
    owner = host()
    before = owner._clients[0]

    def fail(client, params, *, names, compute):
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        owner.step(fail, {}, 0, None)
    assert owner._clients[0] is before

    def change(client, params, *, names, compute):
        changed = replace(client, labels=client.labels + 1)
        return changed, ClientUpdate(0, 1, {}, 0.0, 0, 0)

    owner.step(change, {}, 0, None)
    assert owner._clients[0].labels.tolist() == [1, 1, 2]


def test_of_a_clients_states_three_stay(tmp_path):
    """The last may be of a round in hand, the one before of a round that is not committed yet: the third is."""
    owner = host()
    shard = Shard(0, np.arange(3), np.array(LABELS[0]))
    owner.adopt(make_compute().model, 0, [shard], PLAIN)
    for number in range(1, 6):
        owner._keep(tmp_path, owner._clients[0], Assignment(0, "", "train", number))
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"0.0-0000{number}.npz" for number in (3, 4, 5)]


def test_what_is_remembered_ends_with_the_round_that_is_committed():
    """Round 3 is under way when round 2 is committed: it is no part of that."""
    history = History()
    for number in (1, 2, 3):
        history.record(number, 0, 5, {"w": torch.tensor([3.0, 4.0]) * number})
    past = history.until(2)
    assert {number: own[0].norms["w"] for number, own in past.rounds.items()} == {1: 5.0, 2: 10.0}
    assert past.first[0]["w"].tolist() == [3.0, 4.0]
    assert set(history.rounds) == {1, 2, 3}


def test_counts_pool_and_divide():
    """Class 0: 1 of 2, class 1: 3 of 4, class 2: none: pooled 4/6, classes {0} 1/2, class {2} undefined."""
    counts = Counts(np.array([1, 3, 0]), np.array([2, 4, 0]))
    assert counts.accuracy() == pytest.approx(4 / 6)
    assert counts.accuracy({0}) == 0.5
    assert counts.accuracy({2}) is None
    assert (counts + counts).total.tolist() == [4, 8, 0]


def test_correct_answers_are_counted_per_class():
    """A linear head that always answers 1: all of class 1 is right and nothing else."""
    compute = make_compute()
    params = compute.model.init(torch.Generator().manual_seed(0))
    params = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    params["linear.bias"][1] = 1.0
    client = make_client(0, [0, 1, 1, 2])
    counts = count_correct(compute, params, client.pool, client.pixels, client.indices, client.labels)
    assert (counts.correct.tolist(), counts.total.tolist()) == ([0, 2, 0], [1, 2, 1])


def test_own_data_are_counted_by_forget_set_and_rest():
    """Class 1 is forgotten, class 2 was before: 4 samples in D_f, 2 remain, class 2 in neither."""
    owner = host()
    compute = make_compute()
    params = {name: torch.zeros_like(t) for name, t in compute.model.init(torch.Generator()).items()}
    params["linear.bias"][1] = 1.0
    branch = Branch("2:class:1", ForgetSet(frozenset([1])), earlier=ForgetSet(frozenset([2])))
    forgotten, retained = owner.own_counts(params, [0, 1, 2], branch)
    assert (forgotten.total.tolist(), forgotten.correct.tolist()) == ([0, 4, 0], [0, 4, 0])
    assert (retained.total.tolist(), retained.correct.tolist()) == ([2, 0, 0], [0, 0, 0])


def test_looking_inline_tells_at_once_and_counts_the_forgotten_clients_data():
    """A model that always answers 1: of the 8 test samples 4 are of class 1; client 1 holds 3 of them and a 2."""
    executor = InlineExecutor(host())
    params = {name: torch.zeros_like(t) for name, t in make_compute().model.init(torch.Generator()).items()}
    params["linear.bias"][1] = 1.0
    found: list[Looked] = []
    branch = Branch("client:1", ForgetSet(clients=frozenset([1])))
    executor.look(params, 8, [1], branch, found.append)
    (looked,) = found
    assert (looked.test.correct.sum(), looked.test.total.sum()) == (4, 8)
    assert looked.own is not None
    assert (looked.own.correct.sum(), looked.own.total.sum()) == (3, 4)
    executor.look(params, 8, [], branch, found.append)
    assert found[1].own is None
    assert looked.elapsed_s > 0


@pytest.mark.parametrize(("num_test", "parts"), [(360, 2), (10_000, 10), (99, 3), (1000, 1), (450, 7)])
def test_pieces_cover_the_test_set_at_fixed_borders(num_test, parts):
    """Every border but the last is a multiple of the evaluation batch, so batches never differ."""
    found = pieces(num_test, parts)
    assert found[0][0] == 0
    assert found[-1][1] == num_test
    assert all(a[1] == b[0] and a[1] % BATCH == 0 for a, b in pairwise(found))
    assert len(found) <= parts
