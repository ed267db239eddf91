"""What the cells of a sweep share is done once, is copied with its values, and is never mistaken for another."""

from dataclasses import replace
from functools import partial

import pytest

from qdsim.algorithms import fedavg, local_sgd
from qdsim.algorithms.history import History, UpdateNorms
from qdsim.data import datasets
from qdsim.experiment import config, plan, sharing
from qdsim.experiment.checkpoint import Checkpoint
from qdsim.store import completeness
from qdsim.store.run_directory import TableWriter
from qdsim.store.verify import difference
from tests.examples import FORGETFUL
from tests.experiment.test_resume import Stopped
from tests.runs import TINY, run, table

SETTINGS = {
    "methods": ["quickdrop", "retrain", "federaser"],
    "partition": {"clients": 4},
    "membership": ["loss_threshold"],
    "sweep": {"synthetic.scale": [10, 20]},
}
SECOND = "synthetic.scale=20"


def computed(events):
    """Count the rounds that were really computed, by cell and method."""
    rounds = [(e.cell, e.method) for e in events if e.row is not None and not e.finished]
    return {key: rounds.count(key) for key in set(rounds)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The sweep, and what it reported."""
    events = []
    return run(tmp_path_factory.mktemp("runs"), **SETTINGS, emit=events.append), events


def test_a_baseline_that_the_swept_key_cannot_affect_runs_once(undisturbed):
    """Retrain-Or: 3 rounds and 1 of relearning; FedEraser: 1, 3 and 1; then only QuickDrop's 1, 2 and 1."""
    run_dir, events = undisturbed
    first = "synthetic.scale=10"
    assert computed(events) == {
        (first, "shared"): 3,
        (first, "quickdrop"): 4,
        (first, "retrain"): 4,
        (first, "federaser"): 5,
        (SECOND, "shared"): 3,
        (SECOND, "quickdrop"): 4,
    }
    reused = {(e.method, e.cell, e.reused_from) for e in events if e.reused_from}
    assert reused == {(method, SECOND, first) for method in ("retrain", "federaser")}
    for name in ("rounds", "stages", "classes", "clients"):
        found = table(run_dir, name)
        copied = (found["cell"] == SECOND) & found["method"].isin(["retrain", "federaser"])
        assert found["reused"].equals(copied)
    assert len(table(run_dir, "membership").groupby(["cell", "method"])) == 6
    assert completeness.examine(run_dir).problem is None
    assert not (run_dir / "checkpoint").exists()


def test_what_is_copied_has_the_values_of_a_run_that_shares_nothing(undisturbed, tmp_path, monkeypatch):
    """Every value of every table but clocks and ``reused``."""
    run_dir, _ = undisturbed
    monkeypatch.setattr(sharing, "key_of", lambda *_: "")
    alone = run(tmp_path, **SETTINGS)
    assert not table(alone, "rounds")["reused"].any()
    assert difference(alone, run_dir) is None


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (Checkpoint, "note_served", 1),  # retrain's model is not written yet
        (Checkpoint, "save", 17),  # the first cell is done: its 3 + 13 rounds, and a round of the second training
        (TableWriter, "append", 95),  # among the rows that are copied
        (TableWriter, "append", 100),
        (TableWriter, "append", 104),
    ],
)
def test_a_sweep_that_was_cut_off_copies_what_it_would_have(undisturbed, tmp_path, monkeypatch, owner, name, after):
    """Between cells, before a task is noted, among the copied rows: resumed it ends with the same values."""
    calls = [0]
    real = getattr(owner, name)

    def counting(self, *arguments, **named):
        calls[0] += 1
        if calls[0] > after:
            raise Stopped
        return real(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counting)
        with pytest.raises(Stopped):
            run(tmp_path, **SETTINGS)
    resumed = run(tmp_path, **SETTINGS, resume=True)
    assert difference(undisturbed[0], resumed) is None
    rounds = table(resumed, "rounds")
    assert rounds.query(f"cell == '{SECOND}' and method == 'federaser'")["reused"].all()


def keys(sweep, methods=("retrain", "sga"), **changes):
    """The key of each cell's tasks, with the same model to begin with."""
    job = config.validate({**TINY, "methods": list(methods), "sweep": sweep, **changes})
    made = plan.build_plan(job, datasets.load("digits", ""))
    params = made.points[0].model.init(plan.seeds.generator(0, "init"))
    found = {}
    for task in made.tasks():
        own = sharing.key_of(made, task, task.phases(), params, (0, 0), "cpu")
        found.setdefault(task.method, []).append(own)
    return found


@pytest.mark.parametrize(
    ("sweep", "shared"),
    [
        ({"synthetic.scale": [10, 20]}, ["retrain", "sga"]),
        ({"recover.steps": [1, 2]}, ["retrain", "sga"]),  # which recover as they train
        ({"unlearn.lr": [0.1, 0.2]}, ["retrain"]),
        ({"sga.recover_rounds": [1, 2]}, ["retrain"]),
        ({"relearn.lr": [0.1, 0.2]}, []),
        ({"train.lr": [0.1, 0.2]}, []),
        ({"partition.alpha": [0.1, 1.0]}, []),
        ({"model.width": [4, 8]}, []),
    ],
    ids=str,
)
def test_a_method_is_shared_where_no_setting_of_its_phases_differs(sweep, shared):
    """Whatever a phase is built of is in the key, and nothing else of the settings."""
    found = keys(sweep)
    assert [method for method, own in found.items() if len(set(own)) == 1] == shared
    assert all(own != "" for each in found.values() for own in each)


def test_what_works_on_synthetic_sets_has_no_key():
    """QuickDrop, whatever is swept; and a job without a sweep has nobody to share with."""
    assert keys({"unlearn.lr": [0.1, 0.2]}, ["quickdrop"]) == {"quickdrop": ["", ""]}
    assert keys({}, ["retrain"]) == {"retrain": [""]}


def test_a_method_from_outside_has_no_key(monkeypatch):
    """Its steps may look at a client's synthetic set, whatever its view of the data says: it runs in every cell."""
    monkeypatch.syspath_prepend(FORGETFUL)
    found = keys({"synthetic.scale": [10, 20]}, ["quickdrop", "retrain", "forgetful.drift:METHOD"])
    assert found["drift"] == ["", ""]
    assert found["retrain"][0] == found["retrain"][1] != ""


def test_what_was_noted_of_a_task_is_a_key_or_nothing(tmp_path):
    """A list where a seed should be, as a damaged file may have it, is no task."""
    noted = Checkpoint(tmp_path)
    noted.note_served("abc", plan.PhaseKey(0, "a=1", "retrain", "class:9", ""))
    assert noted.served("abc") == (0, "a=1", "retrain", "class:9", "")
    file = noted._served_file("abc")
    file.write_text(file.read_text().replace('"seed": 0', '"seed": [0]'))
    assert noted.served("abc") is None


def test_steps_that_may_hide_something_have_no_key():
    """A closure, a lambda and an object of a foreign class may be equal in name only; a function at the top is not."""
    local = [1]

    def closure():
        return local

    for hidden in (closure, lambda: None, object(), partial(local_sgd.run, view=closure)):
        with pytest.raises(sharing._Unknown):
            sharing._plain(hidden)
    assert sharing._plain(fedavg.select) == "qdsim.algorithms.fedavg.select"


def test_another_history_is_another_key():
    """FedEraser's steps hold it: the lengths of the updates are part of what they do."""
    job = config.validate({**TINY, "methods": ["federaser"], "sweep": {"synthetic.scale": [10, 20]}})
    made = plan.build_plan(job, datasets.load("digits", ""))
    task = made.tasks()[0]
    params = task.point.model.init(plan.seeds.generator(0, "init"))
    first = {0: {name: tensor for name, tensor in params.items()}}

    def key(length):
        norms = UpdateNorms(1, dict.fromkeys(params, length))
        history = History({1: {0: norms}, 2: {0: norms}}, first)
        return sharing.key_of(made, task, task.phases(history), params, (0, 0), "cpu")

    assert key(1.0) == key(1.0)
    assert key(1.0) != key(2.0)
    assert replace(task, index=3).key() == task.key()


def test_a_plan_counts_what_cells_share_once():
    """Two cells: both trainings, both of QuickDrop's, one of Retrain-Or's; over recovery's steps one training."""

    def phases(sweep):
        job = config.validate({**TINY, "methods": ["quickdrop", "retrain"], "sweep": sweep})
        made = plan.build_plan(job, datasets.load("digits", ""))
        found = [(task.method, phase.name) for task, phase in sharing.computed(made)]
        return {key: found.count(key) for key in found}

    once = {("retrain", "unlearn"): 1, ("retrain", "relearn"): 1}
    twice = {("quickdrop", "unlearn"): 2, ("quickdrop", "recover"): 2, ("quickdrop", "relearn"): 2}
    assert phases({"synthetic.scale": [10, 20]}) == {("shared", "train"): 2, **twice, **once}
    assert phases({"recover.steps": [1, 2]}) == {("shared", "train"): 1, **twice, **once}
