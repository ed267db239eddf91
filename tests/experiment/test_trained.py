"""Train once, branch many: trained states are stored, found again, and never mistaken for another."""

import json
import shutil
import threading
import time

import numpy as np
import pytest

import qdsim
from qdsim.errors import BadInput
from qdsim.store import lock
from qdsim.store.run_directory import read_manifest
from qdsim.store.verify import difference
from tests.runs import TINY, run, table

SIX = ["quickdrop", "retrain", "sga", "federaser", "fump"]
KEYS = ["cell", "method", "request", "phase", "round"]


def trainings(events):
    """Count the rounds of training that were really done."""
    return sum(e.row is not None and e.method == "shared" and not e.finished for e in events)


def states(out):
    return [path for path in (out / ".trained").iterdir() if not path.name.startswith(".")]


def hashes(run_dir):
    return table(run_dir, "rounds").set_index(KEYS)["params_sha256"].sort_index()


@pytest.fixture(scope="module")
def all_methods(tmp_path_factory):
    """One run of all class-level methods, with what it reported, and one of all client-level ones beside it."""
    out, events = tmp_path_factory.mktemp("runs"), []
    by_class = run(out, methods=SIX, emit=events.append)
    others = ["quickdrop", "retrain", "sga", "federaser", "s2u"]
    later = []
    by_client = run(out, methods=others, requests=[{"kind": "client", "target": 2}], emit=later.append)
    return out, by_class, events, by_client, later


def test_training_is_done_once_for_all_methods(all_methods):
    """Three rounds for five methods, and none for the six that follow at client level in another run."""
    out, by_class, events, by_client, later = all_methods
    assert trainings(events) == 3
    assert trainings(later) == 0
    assert len(states(out)) == 1
    rounds = table(by_class, "rounds")
    assert set(rounds["method"]) == {"shared", *SIX}
    assert not rounds["reused"].any()
    assert set(table(by_client, "rounds")["method"]) == {"shared", "quickdrop", "retrain", "sga", "federaser", "s2u"}


def test_a_run_that_reuses_a_training_has_its_rows(all_methods):
    """All four tables have the rows of training with their clocks, marked as reused; nothing else is."""
    _, by_class, _, by_client, _ = all_methods
    for name in ("rounds", "stages", "classes", "clients"):
        first, second = table(by_class, name), table(by_client, name)
        first, second = (t[t["method"] == "shared"].reset_index(drop=True) for t in (first, second))
        assert second["reused"].all()
        assert len(second) == len(first) > 0
        same = [c for c in first.columns if c not in ("run_id", "reused")]
        order = [c for c in ("round", "class", "client_id") if c in same]
        assert second.sort_values(order)[same].equals(first.sort_values(order)[same])
        assert not table(by_client, name).query("method != 'shared'")["reused"].any()
    assert len(table(by_client, "partitions")) == 100


def test_a_reused_training_leads_to_the_same_bits(all_methods, tmp_path):
    """The same job in another place, trained anew: equal hashes everywhere."""
    *_, by_client, _ = all_methods
    anew = run(tmp_path, methods=["quickdrop", "federaser"], requests=[{"kind": "client", "target": 2}])
    expected = hashes(anew)
    assert hashes(by_client).loc[expected.index].equals(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": [1]},
        {"train": {"lr": 0.05}},
        {"train": {"stop": "converged"}},
        {"model": {"width": 8}},
        {"partition": {"alpha": 1.0}},
        {"synthetic": {"lr": 0.2}},
        {"synthetic": {"matching": False}},
        {"cluster": {"micro_batch": 16}},
        {"cluster": {"winograd": "always"}},
        {"methods": ["retrain"]},  # nothing distils: another training
    ],
    ids=str,
)
def test_another_training_has_another_name(all_methods, changes):
    """Whatever training depends on is in the hash; the stored states then differ."""
    out, *_ = all_methods
    events = []
    run(out, **{"methods": ["quickdrop"], **changes}, emit=events.append)
    assert trainings(events) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"unlearn": {"lr": 0.01}},
        {"recover": {"rounds": 1}},
        {"requests": [{"kind": "class", "target": 3}]},
        {"federaser": {"interval": 1}, "methods": ["quickdrop", "federaser"]},
        {"name": "other"},
    ],
    ids=str,
)
def test_what_follows_training_is_not_in_its_name(all_methods, changes):
    """Unlearning, requests, names and methods' own settings share one training."""
    out, *_ = all_methods
    events = []
    run(out, **{"methods": ["quickdrop"], **changes}, emit=events.append)
    assert trainings(events) == 0


def test_finetuning_starts_from_the_stored_training(all_methods, monkeypatch):
    """F = 1 and 2 as a sweep: no round of training, one and two fresh networks; F = 1 again: nothing at all."""
    from qdsim.algorithms import distillation

    monkeypatch.setattr(distillation, "FINETUNE_STEPS", 2)
    out, *_ = all_methods
    for values, expected in (([0, 1, 2], 3), ([1], 0)):
        events = []
        found = run(out, methods=["quickdrop"], sweep={"synthetic.finetune": values}, emit=events.append)
        assert trainings(events) == expected
        stages = table(found, "stages").query("phase == 'finetune'").set_index("cell")["rounds_run"]
        assert stages.to_dict() == {f"synthetic.finetune={f}": f for f in values if f}


def test_the_state_holds_no_code_and_says_what_it_is(all_methods):
    """Arrays, Parquet and JSON; the clients' files are their own; nothing temporary is left."""
    out, *_ = all_methods
    for path in (out / ".trained").iterdir():
        assert not path.name.startswith(".")
        assert {file.suffix for file in path.rglob("*") if file.is_file()} <= {".npz", ".parquet", ".json"}
        described = json.loads((path / "state.json").read_text())
        clients = list((path / "clients").iterdir())
        assert len(clients) == (10 if described["synthetic"] else 0)
    with np.load(path / "params.npz", allow_pickle=False) as arrays:
        assert "linear.weight" in arrays


def test_a_damaged_state_is_refused_with_the_way_out(tmp_path):
    """A truncated model, and a truncated synthetic set: one line each."""
    run(tmp_path, methods=["quickdrop"])
    (state,) = states(tmp_path)
    whole = (state / "params.npz").read_bytes()
    (state / "params.npz").write_bytes(whole[:100])
    with pytest.raises(BadInput, match=r"params\.npz.*cannot be read.*delete the folder under \.trained"):
        run(tmp_path, methods=["quickdrop"])
    (state / "params.npz").write_bytes(whole)
    client = state / "clients" / "3.npz"
    client.write_bytes(client.read_bytes()[:200])
    with pytest.raises(BadInput, match=r"clients/3\.npz.*cannot be read.*delete the folder under \.trained"):
        run(tmp_path, methods=["quickdrop"])
    (state / "state.json").write_text("[1]")
    with pytest.raises(BadInput, match=r"state\.json holds no object.*delete the folder under \.trained"):
        run(tmp_path, methods=["quickdrop"])


def test_a_run_resumes_request_by_request(tmp_path):
    """Stopped after the first of two methods: --resume does the second alone; the tables are those of one run."""
    seen = []

    def stop_at_second(event):
        seen.append(event)
        if event.method == "sga":
            raise KeyboardInterrupt

    settings = {"methods": ["quickdrop", "sga"], "requests": [{"kind": "class", "target": c} for c in (9, 3)]}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **settings, emit=stop_at_second)
    events = []
    resumed = run(tmp_path, **settings, emit=events.append, resume=True)
    assert len(list(tmp_path.glob("tiny-*"))) == 1
    assert {e.method for e in events if e.row is not None} == {"sga"}
    assert trainings(events) == 0
    whole = run(tmp_path / "other", **settings)
    assert hashes(resumed).equals(hashes(whole))
    assert not table(resumed, "rounds")["reused"].any()
    manifest = read_manifest(resumed)
    assert (manifest["state"], len(manifest["resumed_at"])) == ("done", 1)
    # finished: nothing is done again; other settings: refused; where clients sit may change
    again = []
    assert run(tmp_path, **settings, emit=again.append, resume=True) == resumed
    assert run(tmp_path, **settings, cluster={"threads": 2}, resume=True) == resumed
    assert again == []
    with pytest.raises(BadInput, match=r"other settings: unlearn\.lr \(then 0\.1, now 0\.5\)"):
        run(tmp_path, **settings, unlearn={"lr": 0.5}, resume=True)


def test_a_sequence_resumes_from_the_model_that_the_last_request_left(tmp_path):
    """Stopped in the second of three requests: the third builds on the second, with the same bits."""
    settings = {"methods": ["quickdrop"], "sequence": True}
    settings["requests"] = [{"kind": "class", "target": c} for c in (9, 3, 5)]

    def stop_at_second(event):
        if event.request.startswith("2:") and event.phase == "recover":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **settings, emit=stop_at_second)
    resumed = run(tmp_path, **settings, resume=True)
    assert hashes(resumed).equals(hashes(run(tmp_path / "other", **settings)))


def test_a_run_interrupted_in_training_resumes_without_a_row_twice(tmp_path):
    """Stopped in training; meanwhile another run stores the same training; then resumed from it."""

    def stop_in_training(event):
        if event.row is not None and event.round_number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, methods=["quickdrop"], emit=stop_in_training)
    run(tmp_path, methods=["quickdrop"], name="other")
    resumed = run(tmp_path, methods=["quickdrop"], resume=True)
    trained = table(resumed, "rounds").query("method == 'shared'")
    assert sorted(trained["round"]) == [1, 2, 3]
    assert len(table(resumed, "clients").query("method == 'shared'")) == 30


def test_a_run_whose_stored_training_is_gone_trains_again_without_a_row_twice(tmp_path):
    """It reused a state, was interrupted, and the state was deleted."""
    run(tmp_path, methods=["quickdrop"], name="other")

    def stop_in_unlearning(event):
        if event.phase == "unlearn":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, methods=["quickdrop"], emit=stop_in_unlearning)
    shutil.rmtree(tmp_path / ".trained")
    resumed = run(tmp_path, methods=["quickdrop"], resume=True)
    trained = table(resumed, "rounds").query("method == 'shared'")
    assert sorted(trained["round"]) == [1, 2, 3]
    assert not trained["reused"].any()


def test_a_run_is_not_resumed_from_a_training_of_other_bits(tmp_path):
    """The micro-batch moves bits: what was served before started from another model."""

    def stop_at_second(event):
        if event.method == "sga":
            raise KeyboardInterrupt

    settings = {"methods": ["quickdrop", "sga"]}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **settings, emit=stop_at_second)
    with pytest.raises(BadInput, match=r"its training had other settings: micro_batch \(then 'auto', now 5\)"):
        run(tmp_path, **settings, cluster={"micro_batch": 5}, resume=True)


def test_resuming_with_nothing_there_starts_a_run(tmp_path):
    """As the first run of the job."""
    assert read_manifest(run(tmp_path, methods=["quickdrop"], resume=True))["state"] == "done"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("params.npz", "is params of"),
        ("history.npz", "is history of"),
        ("clients/0.npz", "is client 0 of"),
        ("tables/rounds.parquet", "is of another training"),
        ("tables/clients.parquet", "is of another training"),
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_a_stored_training_of_which_a_file_is_lost_or_anothers_is_not_taken(two_trainings, tmp_path, file, said, lost):
    """With another learning rate: the same names and shapes."""
    here, there = two_trainings
    shutil.copytree(here, tmp_path / "runs")
    (state,), (other,) = states(tmp_path / "runs"), states(there)
    if lost:
        (state / file).unlink()
    else:
        shutil.copy(other / file, state / file)
    with pytest.raises(BadInput, match=r"No such file|cannot be read" if lost else said) as caught:
        run(tmp_path / "runs", methods=["quickdrop"], train={"rounds": 1})
    assert str(state) in str(caught.value)


@pytest.fixture(scope="module")
def two_trainings(tmp_path_factory):
    """Two folders, each with a training of one round, which differ in the learning rate."""
    folders = [tmp_path_factory.mktemp(name) for name in ("slow", "fast")]
    for folder, lr in zip(folders, (0.1, 0.05), strict=True):
        run(folder, methods=["quickdrop"], train={"rounds": 1, "lr": lr})
    return folders


def test_who_comes_to_the_same_training_waits_for_it(tmp_path):
    """Trials of a search share a folder of trained states: while one trains, another waits for what is stored.

    Here the one that trains is this test: it holds the turn until the other has said that it waits, then stores.
    """
    small = {**TINY, "methods": ["retrain"]}
    first = qdsim.run(small, out=tmp_path / "first", engine="inline", progress=False)
    (stored,) = states(tmp_path / "first")
    shared, found = tmp_path / "shared" / ".trained", []
    turn = shared / "turns" / stored.name
    turn.mkdir(parents=True)
    options = {"out": tmp_path / "trials", "trained_in": tmp_path / "shared", "engine": "inline", "progress": False}
    trial = threading.Thread(target=lambda: found.append(qdsim.run(small, **options)))
    with lock.held(turn):
        trial.start()
        while not any("waiting for what it stores" in log.read_text() for log in tmp_path.glob("trials/*/log.txt")):
            assert trial.is_alive()
            time.sleep(0.05)
        shutil.copytree(stored, shared / stored.name)
    trial.join()
    assert table(found[0].path, "rounds").query("phase == 'train'")["reused"].all()
    assert difference(first.path, found[0].path) is None
    assert not list(turn.iterdir()), "the turn was given back"
