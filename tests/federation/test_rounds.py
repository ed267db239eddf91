"""The round loop on toy steps, and how the test set is cut."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from qdsim.algorithms import fedavg
from qdsim.algorithms.history import History
from qdsim.algorithms.phase import ClientUpdate, Phase, RoundContext
from qdsim.algorithms.settings import Stage
from qdsim.algorithms.stopping import TRAINED
from qdsim.data.forgetting import ForgetSet, UnlearningRequest, View
from qdsim.errors import ClientFailed, Diverged
from qdsim.federation.client_host import ClientHost, Images, Shard
from qdsim.federation.client_states import StateFolder
from qdsim.federation.evaluation import evaluate, ranges, training_counts
from qdsim.federation.executor import InlineExecutor
from qdsim.federation.measures import BATCH, Counts, count_correct
from qdsim.federation.rounds import Round, run_phase
from qdsim.models.params import Params
from tests.algorithms.settings import PLAIN
from tests.conftest import make_client, make_compute

LABELS = {0: [0, 0, 1], 1: [1, 1, 1, 2], 2: [2]}


def host() -> ClientHost:
    compute = make_compute()
    labels = np.concatenate([LABELS[i] for i in LABELS])
    source = make_client(9, labels.tolist())
    images = Images(source.pool, source.pool, labels, source.normalization)
    made = ClientHost(compute, images, node_id="n", gpu_id="g")
    starts = np.cumsum([0, *[len(LABELS[i]) for i in LABELS]])
    shards = [Shard(i, np.arange(starts[i], starts[i + 1]), np.array(LABELS[i])) for i in LABELS]
    made.assign_clients(compute.model, 0, shards, None)
    return made


def add_size(client, params, *, ctx, compute):
    """Return θ + |D_i| + round as an update: sums one can do by hand."""
    delta = {"w": torch.tensor([float(len(client.labels) + ctx.round_number)])}
    return client, ClientUpdate(client.client_id, len(client.labels), delta, loss=0.5, gradients=1, samples=3)


def phase(step=add_size, rounds=2, participation=1.0) -> Phase:
    stage = Stage(rounds, 1, 1, 0.1, participation)
    return replace(fedavg.phase("train", stage, View("real")), client_step=step)


class Recording:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.rounds: list[Round] = []
        self.heard: list[tuple[int, int, int]] = []
        self.order: list[str] = []

    def progress(self, round_number, expected, done):
        self.heard.append((round_number, expected, done))

    def evaluate(self, params):
        self.order.append(f"evaluate {params['w'].item():g}")

    def commit(self, finished):
        self.order.append(f"commit {finished.number}")
        self.rounds.append(finished)
        return False


def run_on(executor, made: Phase, sizes, observer) -> Params:
    return run_phase(made, {"w": torch.zeros(1)}, np.array(sizes), executor, observer, run_seed=0)


def test_two_rounds_by_hand():
    """Sizes 3, 4, 1: round 1 adds (3·4 + 4·5 + 1·2) / 8 = 4.25, round 2 one more: θ = 4.25, then 9.5."""
    observer = Recording()
    start: Params = {"w": torch.tensor([0.0])}
    end = run_phase(phase(), start, np.array([3, 4, 1]), InlineExecutor(host()), observer, run_seed=0)
    results = observer.rounds
    assert [r.params["w"].item() for r in results] == pytest.approx([4.25, 9.5])
    assert end["w"].item() == pytest.approx(9.5)
    assert [r.number for r in results] == [1, 2]
    assert [u.client_id for u in results[0].updates] == [0, 1, 2]
    assert all(u.delta == {} and u.bytes_up == 4 and u.node_id == "n" and u.gpu_id == "g" for u in results[0].updates)
    assert (results[0].bytes_down, results[0].expected) == (12, 3)
    assert observer.heard == [(n, 3, done) for n in (1, 2) for done in (0, 1, 2, 3)]
    assert start["w"].item() == 0.0


def test_clients_without_data_take_no_part():
    """With sizes 3, 0, 1 client 1 is not asked."""
    observer = Recording()
    run_on(InlineExecutor(host()), phase(), [3, 0, 1], observer)
    assert [u.client_id for u in observer.rounds[0].updates] == [0, 2]


class Overlapping(InlineExecutor):
    """Keeps note of the calls."""

    def submit(self, call):
        self.order.append(f"step {call.client_id}")
        return super().submit(call)


def test_a_round_is_committed_while_the_next_ones_steps_run():
    """Where calls overlap: steps of round 2 are submitted, the largest client first, then round 1 is committed."""
    observer = Recording()
    executor = Overlapping(host(), overlaps=True)
    executor.order = observer.order
    run_on(executor, phase(), [3, 4, 1], observer)
    steps = ["step 1", "step 0", "step 2"]
    assert observer.order == [*steps, "evaluate 4.25", *steps, "commit 1", "evaluate 9.5", "commit 2"]


def test_where_a_rule_may_end_the_phase_nothing_overlaps_the_decision():
    """The rule is reached after round 1: no step of round 2 is submitted."""
    observer = Recording()
    observer.commit = lambda finished: observer.order.append(f"commit {finished.number}") or True
    executor = Overlapping(host(), overlaps=True)
    executor.order = observer.order
    made = replace(phase(rounds=5), rule=TRAINED)
    end = run_on(executor, replace(made, stage=replace(made.stage, stop="converged")), [3, 4, 1], observer)
    assert observer.order == ["step 1", "step 0", "step 2", "evaluate 4.25", "commit 1"]
    assert end["w"].item() == pytest.approx(4.25)


def test_a_client_that_diverges_stops_the_run_and_is_named():
    """Nobody is left out of an average in silence."""

    def diverge(client, params, *, ctx, compute):
        if client.client_id == 1:
            raise Diverged("loss inf")
        return add_size(client, params, ctx=ctx, compute=compute)

    with pytest.raises(ClientFailed, match="client 1 failed in train, round 1, on this machine: Diverged: loss inf"):
        run_on(InlineExecutor(host()), phase(diverge), [3, 4, 1], Recording())


def test_a_failed_step_leaves_the_state_as_it_was():
    """The host keeps the old client when the step raises."""
    owner = host()
    before = owner._clients[0]

    def fail(client, params, *, ctx, compute):
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        owner.step({}, fail, 0, None)
    assert owner._clients[0] is before

    def change(client, params, *, ctx, compute):
        changed = replace(client, labels=client.labels + 1)
        return changed, ClientUpdate(0, 1, {}, 0.0, 0, 0)

    owner.step({}, change, 0, None)
    assert owner._clients[0].labels.tolist() == [1, 1, 2]


def test_of_a_clients_states_three_stay(tmp_path):
    """The last may be of a round in hand, the one before of a round that is not committed yet: the third is."""
    owner = host()
    shard = Shard(0, np.arange(3), np.array(LABELS[0]))
    owner.assign_clients(make_compute().model, 0, [shard], PLAIN)
    folder = StateFolder(tmp_path, "a run")
    for number in range(1, 6):
        owner._save_state(folder, owner._clients[0], RoundContext(0, "", "train", number))
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
    counts = count_correct(compute, params, client.pool, client.normalization, client.indices, client.labels)
    assert (counts.correct.tolist(), counts.total.tolist()) == ([0, 2, 0], [1, 2, 1])


def test_own_data_are_counted_by_forget_set_and_rest():
    """Class 1 is forgotten, class 2 was before: 4 samples in D_f, 2 remain, class 2 in neither."""
    owner = host()
    compute = make_compute()
    params = {name: torch.zeros_like(t) for name, t in compute.model.init(torch.Generator()).items()}
    params["linear.bias"][1] = 1.0
    request = UnlearningRequest("2:class:1", ForgetSet(frozenset([1])), previously_forgotten=ForgetSet(frozenset([2])))
    forgotten, retained = owner.client_counts(params, (0, 1, 2), request)
    assert (forgotten.total.tolist(), forgotten.correct.tolist()) == ([0, 4, 0], [0, 4, 0])
    assert (retained.total.tolist(), retained.correct.tolist()) == ([2, 0, 0], [0, 0, 0])


def test_an_evaluation_counts_the_test_set_and_the_forgotten_clients_data():
    """A model that always answers 1: of the 8 test samples 4 are of class 1; client 1 holds 3 of them and a 2."""
    executor = InlineExecutor(host())
    params = {name: torch.zeros_like(t) for name, t in make_compute().model.init(torch.Generator()).items()}
    params["linear.bias"][1] = 1.0
    request = UnlearningRequest("client:1", ForgetSet(clients=frozenset([1])))
    found = evaluate(executor, params, 8, request).result()
    assert (found.test.correct.sum(), found.test.total.sum()) == (4, 8)
    assert found.forgotten_clients is not None
    assert (found.forgotten_clients.correct.sum(), found.forgotten_clients.total.sum()) == (3, 4)
    assert found.elapsed_s > 0
    of_class = UnlearningRequest("class:1", ForgetSet(classes=frozenset([1])))
    assert evaluate(executor, params, 8, of_class).result().forgotten_clients is None
    forgotten, retained = training_counts(executor, params, of_class)
    assert (forgotten.total.sum(), retained.total.sum()) == (4, 4)


@pytest.mark.parametrize(("num_test", "parts"), [(360, 2), (10_000, 10), (99, 3), (1000, 1), (450, 7)])
def test_ranges_cover_the_test_set_at_fixed_borders(num_test, parts):
    """Every border but the last is a multiple of the evaluation batch, so batches never differ."""
    found = ranges(num_test, parts)
    assert found[0][0] == 0
    assert found[-1][1] == num_test
    assert all(a[1] == b[0] and a[1] % BATCH == 0 for a, b in pairwise(found))
    assert len(found) <= parts
