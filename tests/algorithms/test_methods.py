"""All six methods through the engine: what each leaves in the tables, sweeps, and pairs that are refused."""

import io
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from qdsim.algorithms import fump
from qdsim.algorithms.methods import CAPABILITIES, METHODS
from qdsim.api import display
from qdsim.data import datasets, partition
from qdsim.errors import BadInput
from qdsim.experiment import config, plan
from qdsim.models.convnet import ConvNet
from qdsim.models.params import from_numpy, sha256
from qdsim.store import arrays, completeness, summary
from qdsim.store.run_directory import read_manifest
from tests.runs import TINY, run, table

LAYERS = ConvNet(1, 8, 10, width=4, depth=2).prunable
"""Of the tiny job's network."""
CLASS_METHODS = ["quickdrop", "retrain", "sga", "federaser", "fump"]


@pytest.fixture(scope="module")
def by_class(tmp_path_factory):
    """All class-level methods on one class, with both attacks."""
    return run(tmp_path_factory.mktemp("runs"), methods=CLASS_METHODS, membership=["loss_threshold", "entropy_svm"])


@pytest.fixture(scope="module")
def by_client(tmp_path_factory):
    """All client-level methods on one client."""
    methods = ["quickdrop", "retrain", "sga", "federaser", "s2u"]
    out = tmp_path_factory.mktemp("runs")
    return run(out, methods=methods, requests=[{"kind": "client", "target": 2}], membership=["loss_threshold"])


def read_params(path):
    return from_numpy(arrays.load(path, fix=""))


def rounds_of(run_dir):
    return table(run_dir, "stages").set_index(["method", "phase"])["rounds_run"].to_dict()


def test_stages_of_the_class_level_methods(by_class):
    """K = 3 here: FedEraser replays one of three rounds at Δt = 2; FU-MP relearns nothing."""
    found = rounds_of(by_class)
    assert found == {
        ("shared", "train"): 3,
        ("quickdrop", "unlearn"): 1, ("quickdrop", "recover"): 2, ("quickdrop", "relearn"): 1,
        ("retrain", "unlearn"): 3, ("retrain", "relearn"): 1,
        ("sga", "unlearn"): 2, ("sga", "recover"): 2, ("sga", "relearn"): 1,
        ("federaser", "unlearn"): 1, ("federaser", "recover"): 3, ("federaser", "relearn"): 1,
        ("fump", "unlearn"): 1, ("fump", "recover"): 4,
    }  # fmt: skip


def test_stages_of_the_client_level_methods(by_client):
    """S2U unlearns and recovers in one."""
    found = rounds_of(by_client)
    assert {phase for method, phase in found if method == "s2u"} == {"unlearn", "relearn"}
    assert found["s2u", "unlearn"] == 10
    clients = table(by_client, "clients")
    taking_part = clients.groupby(["method", "phase"])["client_id"].apply(set)
    assert taking_part["s2u", "unlearn"] == set(range(10))
    assert taking_part["sga", "unlearn"] == {2}
    for method in ("sga", "federaser"):
        assert 2 not in taking_part[method, "recover"]


def test_federasers_stored_round_costs_nobody_anything(by_client):
    """Client level, Δt = 2 of K = 3: the one replayed round is the stored one, with no participants."""
    (stored,) = table(by_client, "rounds").query("method == 'federaser' and phase == 'unlearn'").to_dict("records")
    assert (stored["participants_expected"], stored["samples"], stored["client_compute_s"]) == (0, 0, 0.0)
    stages = table(by_client, "stages").set_index(["method", "phase"])
    model_bytes = 4 * (40 + 8 + 148 + 8 + 170)
    kept = stages.loc[("federaser", "unlearn")]
    assert kept["storage_bytes_nominal"] == 10 * model_bytes  # one retained round of ten clients
    assert kept["storage_bytes"] == 10 * 10 * 8 + 10 * model_bytes  # ten lengths each, and the round whole
    assert stages.loc[("s2u", "unlearn"), "storage_bytes"] == 0


def test_data_sizes_are_those_of_the_methods(by_class):
    """SGA-Or: D_f, then the rest; FU-MP looks at everything; FedEraser and retraining at the rest."""
    rounds = table(by_class, "rounds").drop_duplicates(["method", "phase"]).set_index(["method", "phase"])["data_size"]
    parts = table(by_class, "partitions")
    nine = parts.loc[parts["class"] == 9, "num_samples"].sum()
    assert rounds["sga", "unlearn"] == nine
    assert rounds["fump", "unlearn"] == 1437
    for key in (("sga", "recover"), ("federaser", "unlearn"), ("fump", "recover"), ("retrain", "unlearn")):
        assert rounds[key] == 1437 - nine


def test_pruned_channels_are_exactly_zero_in_the_stored_model(by_class):
    """The model that FU-MP leaves after recovery: 30 % of eight channels are two, all of whose parts are zero."""
    params = read_params(by_class / "models" / "seed-0-fump-class-9.npz")
    assert sum(int(mask.sum()) for mask in fump.pruned(params, LAYERS)) == 2
    others = read_params(by_class / "models" / "seed-0-sga-class-9.npz")
    assert sum(int(mask.sum()) for mask in fump.pruned(others, LAYERS)) == 0


def test_each_task_leaves_the_model_that_has_forgotten(by_class):
    """Its hash is that of the last round before relearning."""
    rounds = table(by_class, "rounds")
    for method in CLASS_METHODS:
        served = rounds[(rounds["method"] == method) & (rounds["phase"] != "relearn")]
        last = served[served["phase"] == ("recover" if "recover" in set(served["phase"]) else "unlearn")]
        expected = last.sort_values("round")["params_sha256"].iloc[-1]
        assert sha256(read_params(by_class / "models" / f"seed-0-{method}-class-9.npz")) == expected


def test_membership_stands_beside_the_oracle(by_class, by_client):
    """Two attacks x two subsets x five methods, on the model before relearning."""
    found = table(by_class, "membership")
    assert len(found) == 20
    assert set(found["phase"]) == {"recover", "unlearn"}
    assert found[["member_rate", "auc", "tpr_at_1pct_fpr"]].stack().between(0, 1).all()
    shown = summary.membership_table(by_class)
    oracle = shown[shown["method"] == "retrain"]
    assert (oracle["forget_gap"] == 0).all()
    assert list(shown["method"].iloc[:5]) == CLASS_METHODS
    assert len(table(by_client, "membership")) == 10


def test_an_attack_without_the_oracle_is_refused():
    """Its figures would mean nothing."""
    with pytest.raises(BadInput, match=r"membership = .*add retrain to methods"):
        config.validate({"name": "t", "methods": ["quickdrop"], "membership": ["loss_threshold"]})


@pytest.mark.parametrize(
    ("method", "kind", "text"),
    [
        ("fump", "client", r"FU-MP cannot forget a client: it prunes the channels.*leave fump out of methods"),
        ("s2u", "class", r"S2U cannot forget a class: .*those that can: quickdrop, retrain, sga, federaser, fump"),
    ],
)
def test_unsupported_pairs_are_refused_before_anything_starts(method, kind, text):
    """With the reason and what to change."""
    with pytest.raises(BadInput, match=text):
        config.validate({"name": "t", "methods": ["retrain", method], "requests": [{"kind": kind, "target": 1}]})


def test_every_method_declares_itself(by_class):
    """Title, levels, a reason for each no; the manifest repeats it; the result says that FU-MP does not relearn."""
    assert all(callable(method.load().phases) for method in METHODS.values())
    assert all(set(method.reasons) <= set(CAPABILITIES) for method in METHODS.values())
    reasons = {
        "client": "it prunes the channels that tell a class apart, and a client is no class",
        "relearn": "what it prunes stays pruned",
    }
    declared = {"title": "FU-MP", "class": True, "client": False, "relearn": False, "reasons": reasons}
    assert read_manifest(by_class)["methods"]["fump"] == declared
    assert summary.notes(by_class) == ["FU-MP does not relearn: what it prunes stays pruned"]


def test_methods_do_not_disturb_each_other(by_class, tmp_path):
    """FedEraser alone gives the same hashes as after four others."""
    alone = run(tmp_path, methods=["quickdrop", "federaser"])
    keys = ["method", "phase", "round"]
    expected = table(alone, "rounds").set_index(keys)["params_sha256"]
    assert (table(by_class, "rounds").set_index(keys)["params_sha256"].loc[expected.index] == expected).all()


def test_partial_participation_and_a_sequence_of_all_class_methods(tmp_path):
    """Half the clients a round, two classes in turn: every method's rows are there; what was pruned stays pruned."""
    two = [{"kind": "class", "target": 9}, {"kind": "class", "target": 3}]
    found = run(tmp_path, methods=CLASS_METHODS, requests=two, sequence=True, train={"participation": 0.5, "rounds": 4})
    stages = table(found, "stages").set_index(["method", "request", "phase"])
    for method in CLASS_METHODS:
        assert {request for m, request, _ in stages.index if m == method} == {"1:class:9", "2:class:3"}
    pruned = [
        sum(int(mask.sum()) for mask in fump.pruned(read_params(found / "models" / f"seed-0-fump-{r}.npz"), LAYERS))
        for r in ("1-class-9", "2-class-3")
    ]
    assert pruned == [2, 4]  # two more for the second class


class TestSweeps:
    """A job with values for a field."""

    def test_cells_run_side_by_side_in_one_run(self, tmp_path):
        """Two fields, two values each: four cells, named as in the tables, sharing two trainings."""
        events = []
        swept = {"synthetic.scale": [5, 10], "unlearn.lr": [0.05, 0.1]}
        found = run(tmp_path, methods=["quickdrop"], sweep=swept, emit=events.append)
        cells = [f"synthetic.scale={s},unlearn.lr={lr}" for s in (5, 10) for lr in (0.05, 0.1)]
        stages = table(found, "stages")
        assert [c["cell"] for c in read_manifest(found)["cells"]] == cells
        for cell in cells:
            assert set(stages.loc[stages["cell"] == cell, "phase"]) == {"train", "unlearn", "recover", "relearn"}
        trained = table(found, "rounds").query("method == 'shared'")
        assert trained.groupby("cell")["reused"].all()[cells].tolist() == [False, True, False, True]
        synthetic = table(found, "partitions").groupby("cell")["num_synthetic"].sum()
        assert synthetic[cells[0]] == synthetic[cells[1]] > synthetic[cells[2]]
        shown = summary.stage_table(found)
        assert list(dict.fromkeys(shown["cell"])) == cells

    def test_clients_and_widths_can_be_swept(self, tmp_path):
        """3 and 5 clients, 4 and 8 filters: the actors serve the largest; each cell has its own model."""
        swept = {"partition.clients": [3, 5], "model.width": [4, 8]}
        found = run(tmp_path, methods=["quickdrop"], sweep=swept, train={"rounds": 1})
        parts = table(found, "partitions").groupby("cell")["client_id"].max()
        assert parts["partition.clients=3,model.width=8"] == 2
        assert parts["partition.clients=5,model.width=4"] == 4
        up = table(found, "rounds").query("phase == 'train'").set_index("cell")["bytes_up"]
        assert up["partition.clients=3,model.width=8"] > up["partition.clients=3,model.width=4"]

    def test_a_cell_is_the_job_with_that_value(self, tmp_path):
        """The same hashes as a run with --set."""
        swept = run(tmp_path, methods=["quickdrop"], sweep={"train.lr": [0.05, 0.1]})
        alone = run(tmp_path / "other", methods=["quickdrop"], train={"lr": 0.05})
        keys = ["method", "phase", "round"]
        cell = table(swept, "rounds").query("cell == 'train.lr=0.05'").set_index(keys)["params_sha256"]
        assert cell.sort_index().equals(table(alone, "rounds").set_index(keys)["params_sha256"].sort_index())

    @pytest.mark.parametrize(
        ("sweep", "text"),
        [
            ({"data.dataset": ["mnist"]}, "only keys of these sections can be swept: partition"),
            ({"cluster.threads": [1, 2]}, "only keys of these sections can be swept"),
            ({"seeds": [[0]]}, "only keys of these sections can be swept"),
            ({"train.speed": [1]}, "unknown key; known here: rounds"),
            ({"train.lr": []}, "list at least one value"),
            ({"train.lr": [0.1, 0.1]}, "each value may be listed once"),
            ({"train.lr": [0.1, -1.0]}, r"sweep\.\"train\.lr\" = -1\.0: must be more than 0"),
        ],
        ids=str,
    )
    def test_impossible_sweeps_are_refused(self, sweep, text):
        """One line each, before the data are read."""
        with pytest.raises(BadInput, match=text):
            config.check_sweep(config.validate({"name": "t", "sweep": sweep}))


def test_nan_free_tables(by_class, by_client):
    """No clock, count or score is missing where it must stand."""
    for found in (by_class, by_client):
        rounds = table(found, "rounds")
        served = rounds[rounds["method"] != "shared"]
        assert served[["forget_accuracy", "retain_accuracy", "wall_s", "samples", "data_size"]].notna().all().all()
        assert np.isfinite(served["client_compute_s"]).all()
        assert isinstance(summary.stage_table(found), pd.DataFrame)


def test_random_targets_are_one_row_over_seeds(tmp_path):
    """Each seed draws its own client: the result table calls them client:random and counts both seeds."""
    found = run(
        tmp_path,
        seeds=[0, 1],
        methods=["quickdrop", "retrain"],
        requests=[{"kind": "client", "target": "random"}],
        membership=["loss_threshold"],
        train={"rounds": 1},
    )
    drawn = set(table(found, "stages")["request"]) - {""}
    assert len(drawn) == 2
    shown = summary.stage_table(found)
    assert set(shown["request"]) == {"client:random"}
    assert (shown["n"] == 2).all()
    attacks = summary.membership_table(found)
    assert set(attacks["request"]) == {"client:random"}
    # the gap is the mean over seeds of each seed's own
    rates = table(found, "membership").query("subset == 'forget'").pivot(index="seed", columns="method")["member_rate"]
    gap = (rates["quickdrop"] - rates["retrain"]).mean()
    assert attacks.set_index("method").loc["quickdrop", "forget_gap"] == pytest.approx(gap)


def test_a_random_target_beside_another_request(tmp_path):
    """Two independent requests: both have a row of the trained model."""
    asked = [{"kind": "class", "target": 9}, {"kind": "client", "target": "random"}]
    found = run(tmp_path, methods=["quickdrop"], requests=asked, train={"rounds": 1})
    before = summary.stage_table(found).query("method == 'shared'")
    assert list(before["request"]) == ["class:9", "client:random (2)"]


def test_an_unfinished_run_shows_what_it_has(tmp_path):
    """Stopped before the oracle: the attack's rates stand there, the distance to the oracle does not."""

    def stop(event):
        if event.method == "retrain":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, methods=["quickdrop", "retrain"], membership=["loss_threshold"], train={"rounds": 1}, emit=stop)
    (found,) = tmp_path.glob("tiny-*")
    shown = summary.membership_table(found)
    assert list(shown["method"]) == ["quickdrop"]
    assert shown["forget_gap"].isna().all()
    display.print_result(Console(file=io.StringIO()), found)


def test_the_last_class_of_a_sequence_leaves_retraining_nothing(tmp_path):
    """Ten classes in turn: retraining's tenth model is an untrained one; QuickDrop's has been unlearned."""
    ten = [{"kind": "class", "target": c} for c in (5, 8, 0, 3, 2, 4, 7, 9, 1, 6)]
    events = []
    found = run(
        tmp_path,
        methods=["quickdrop", "retrain", "fump"],
        requests=ten,
        sequence=True,
        train={"rounds": 1},
        membership=["loss_threshold"],
        emit=events.append,
    )
    stages = table(found, "stages").query("request == '10:class:6'")
    assert set(zip(stages["method"], stages["phase"], strict=True)) == {("quickdrop", "unlearn"), ("fump", "unlearn")}
    untrained = read_params(found / "models" / "seed-0-retrain-10-class-6.npz")
    assert (untrained["norm0.weight"] == 1).all()
    done = [e for e in events if e.finished and e.request == "10:class:6"]
    assert [e.phase for e in done] == ["unlearn", "", "unlearn"]
    assert len(table(found, "membership")) == 9 * 3 * 2
    assert completeness.examine(found).problem is None  # a tenth attack has nobody left to ask for


def test_a_class_that_retraining_never_saw_is_never_answered(tmp_path):
    """Its logit is only pushed down: F-Set is exactly 0 for retraining, on test and on training samples."""
    found = run(tmp_path, methods=["retrain"], train={"rounds": 8, "steps": 10}, relearn={"rounds": 0})
    last = table(found, "stages").set_index(["method", "phase"]).loc[("retrain", "unlearn")]
    assert (last["forget_accuracy"], last["forget_accuracy_train"]) == (0.0, 0.0)
    assert last["retain_accuracy"] > 0.5


@pytest.fixture
def lonely_dataset():
    """Digits of which the first 60 are class 0 and the rest have no 0: in the order of a partition by hand."""
    digits = datasets.load("digits", "")
    others = np.where(digits.train_labels == 0, 1, digits.train_labels)
    return replace(digits, train_labels=np.where(np.arange(len(others)) < 60, 0, others))


def test_the_only_holder_unlearns_alone_and_is_left_out_of_recovery(lonely_dataset, monkeypatch):
    """Client 0 holds class 0 and nothing else: it alone forgets it, and has nothing to recover on."""
    rows = np.arange(len(lonely_dataset.train_labels))
    indices = (rows[:60], rows[60:700], rows[700:])
    counts = np.array([np.bincount(lonely_dataset.train_labels[i], minlength=10) for i in indices])
    monkeypatch.setattr(plan, "_split", lambda *_: partition.Partition(indices, counts))
    job = config.validate({**TINY, "partition": {"clients": 3}, "requests": [{"kind": "class", "target": 0}]})
    (task, *_) = plan.build_plan(
        config.validate({**job.model_dump(), "methods": CLASS_METHODS}), lonely_dataset
    ).tasks()
    for method in CLASS_METHODS:
        phases = {p.name: p for p in replace(task, method=method).phases()}
        taking_part = {name: [int(i) for i in np.flatnonzero(task.sizes(phase))] for name, phase in phases.items()}
        unlearning = [0] if method in ("quickdrop", "sga") else [0, 1, 2] if method == "fump" else [1, 2]
        assert taking_part["unlearn"] == unlearning
        assert taking_part.get("recover", [1, 2]) == [1, 2]
