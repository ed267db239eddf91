"""Whole runs without Ray: what the tables say of them."""

import json

import numpy as np
import pytest

from qdsim.errors import ClientFailed
from qdsim.store import summary
from qdsim.store.run_directory import read_manifest
from tests.runs import run, table


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The tiny job, forgetting class 9 with QuickDrop and by retraining."""
    return run(tmp_path_factory.mktemp("runs"))


def test_rounds_have_their_keys(finished):
    """3 of shared training, 1 + 2 + 1 of QuickDrop, 3 + 1 of retraining; each counted from 1."""
    rounds = table(finished, "rounds")
    found = rounds.groupby(["method", "request", "phase"])["round"].apply(sorted).to_dict()
    assert found == {
        ("shared", "", "train"): [1, 2, 3],
        ("quickdrop", "class:9", "unlearn"): [1],
        ("quickdrop", "class:9", "recover"): [1, 2],
        ("quickdrop", "class:9", "relearn"): [1],
        ("retrain", "class:9", "unlearn"): [1, 2, 3],
        ("retrain", "class:9", "relearn"): [1],
    }
    assert (rounds["participants_expected"] == rounds["participants_received"]).all()
    assert (rounds["run_id"] == finished.name).all()
    assert not rounds["reused"].any()


def test_accuracies_are_pooled_fractions(finished):
    """F-Set is class 9's row of `classes`; R-Set the others weighted by their test samples; null in training."""
    rounds, classes = table(finished, "rounds"), table(finished, "classes")
    training = rounds["method"] == "shared"
    assert rounds.loc[training, ["forget_accuracy", "retain_accuracy"]].isna().all().all()
    assert rounds.loc[~training, ["forget_accuracy", "retain_accuracy", "test_accuracy"]].notna().all().all()
    from qdsim.data import datasets

    per_class = np.bincount(datasets.load("digits", "").test_labels)
    keys = ["method", "request", "phase", "round"]
    for key, row in rounds.set_index(keys).iterrows():
        rows = classes.set_index(keys).loc[[key]].sort_values("class")
        accuracy = rows["accuracy"].to_numpy()
        assert row["test_accuracy"] == pytest.approx((accuracy * per_class).sum() / per_class.sum())
        if key[0] != "shared":
            assert row["forget_accuracy"] == accuracy[9]
            kept = (accuracy * per_class)[:9].sum() / per_class[:9].sum()
            assert row["retain_accuracy"] == pytest.approx(kept)


def test_training_accuracies_stand_at_the_end_of_a_phase(finished):
    """On the clients' own data, null in every earlier round."""
    rounds = table(finished, "rounds")
    served = rounds[rounds["method"] != "shared"]
    last = served.groupby(["method", "phase"])["round"].transform("max") == served["round"]
    assert served.loc[last, ["forget_accuracy_train", "retain_accuracy_train"]].notna().all().all()
    assert served.loc[~last, ["forget_accuracy_train", "retain_accuracy_train"]].isna().all().all()


def test_costs_add_up(finished):
    """Samples, bytes and clocks of a round are those of its clients; a stage is the sum of its rounds."""
    rounds, clients, stages = table(finished, "rounds"), table(finished, "clients"), table(finished, "stages")
    keys = ["method", "request", "phase", "round"]
    sums = clients.groupby(keys)["compute_s"].agg(["sum", "max", "size"])
    joined = rounds.set_index(keys).join(sums)
    assert np.allclose(joined["client_compute_s"], joined["sum"])
    assert np.allclose(joined["critical_path_s"], joined["max"])
    assert (joined["participants_received"] == joined["size"]).all()
    model_bytes = 4 * (40 + 8 + 148 + 8 + 170)  # by hand: 4 filters on 8x8, two blocks, ten classes
    assert (joined["bytes_up"] == joined["size"] * model_bytes).all()
    assert (joined["bytes_down"] == joined["size"] * model_bytes).all()
    total = rounds.groupby(["method", "phase"])[["samples", "gradients", "wall_s"]].sum()
    found = stages.set_index(["method", "phase"])[["samples", "gradients", "wall_s"]]
    assert np.allclose(total.sort_index(), found.sort_index())
    training = rounds[rounds["method"] == "shared"]
    # 10 clients, three steps of 16 samples, none of them smaller than 16 here
    assert (table(finished, "partitions").groupby("client_id")["num_samples"].sum() >= 10).all()
    assert (training["gradients"] == 30).all()
    assert (training["data_size"] == 1437).all()


def test_unlearning_works_on_the_synthetic_set_alone(finished):
    """data_size is |S_f|, then twice |S without S_f| (1:1 with real samples), then |D without D_f|."""
    rounds = table(finished, "rounds").drop_duplicates(["method", "phase"]).set_index(["method", "phase"])
    parts = table(finished, "partitions")
    of_nine = parts[parts["class"] == 9]
    assert rounds.loc[("quickdrop", "unlearn"), "data_size"] == of_nine["num_synthetic"].sum()
    rest = parts[parts["class"] != 9]
    assert rounds.loc[("quickdrop", "recover"), "data_size"] == 2 * rest["num_synthetic"].sum()
    assert rounds.loc[("retrain", "unlearn"), "data_size"] == rest["num_samples"].sum()
    assert rounds.loc[("quickdrop", "relearn"), "data_size"] == of_nine["num_synthetic"].sum()
    assert rounds.loc[("retrain", "relearn"), "data_size"] == of_nine["num_samples"].sum()
    holders = set(of_nine.loc[of_nine["num_samples"] > 0, "client_id"])
    clients = table(finished, "clients")
    assert (
        set(clients.loc[(clients["method"] == "quickdrop") & (clients["phase"] == "unlearn"), "client_id"]) == holders
    )


def test_partitions_hold_the_split(finished):
    """100 rows of 10 clients x 10 classes, ceil(n / 10) synthetic samples each, and the file of indices."""
    parts = table(finished, "partitions")
    assert len(parts) == 100
    assert parts["num_samples"].sum() == 1437
    assert (parts["num_synthetic"] == np.ceil(parts["num_samples"] / 10)).all()
    with np.load(finished / "partitions" / "seed-0.npz") as saved:
        sizes = [len(saved[f"client_{i}"]) for i in range(10)]
    assert sizes == parts.groupby("client_id")["num_samples"].sum().tolist()


def test_stages_say_what_ended_them_and_what_they_store(finished):
    """A fixed number of rounds; QuickDrop stores its images, retraining nothing."""
    stages = table(finished, "stages").set_index(["method", "phase"])
    assert (stages["stop_reason"] == "rounds").all()
    assert (stages["converged_round"] <= stages["rounds_run"]).all()
    synthetic = table(finished, "partitions")["num_synthetic"].sum()
    unlearn = stages.loc[("quickdrop", "unlearn")]
    assert unlearn["storage_bytes"] == synthetic * 64 * 5  # float pixels, and the real samples as bytes
    assert unlearn["storage_bytes_nominal"] == synthetic * 64
    assert stages.loc[("retrain", "unlearn"), "storage_bytes"] == 0


def test_the_manifest_says_what_ran(finished):
    """Configuration, versions, hardware, data, what each method supports, and the end."""
    manifest = read_manifest(finished)
    assert (manifest["state"], manifest["engine"]) == ("done", "inline")
    assert manifest["config"]["train"]["rounds"] == 3
    declared = {"title": "QuickDrop", "class": True, "client": True, "relearn": True, "reasons": {}}
    assert manifest["methods"]["quickdrop"] == declared
    assert manifest["data"]["train"] == 1437
    assert set(manifest["versions"]) >= {"qdsim", "python", "torch", "ray"}
    json.dumps(manifest)


def test_the_same_job_gives_the_same_bits(finished, tmp_path):
    """Another run, another id, equal parameter hashes in every round."""
    again = run(tmp_path)
    keys = ["method", "phase", "round"]
    first, second = (table(r, "rounds").set_index(keys)["params_sha256"].sort_index() for r in (finished, again))
    assert first.equals(second)


def test_branches_start_from_one_trained_model(finished, tmp_path):
    """A request's hashes do not depend on which others stand before it."""
    both = run(tmp_path, requests=[{"kind": "class", "target": 3}, {"kind": "class", "target": 9}])
    keys = ["method", "request", "phase", "round"]
    alone = table(finished, "rounds").set_index(keys)["params_sha256"]
    shared = table(both, "rounds").set_index(keys)["params_sha256"]
    assert (shared.loc[alone.index] == alone).all()
    assert len(shared) > len(alone)


def test_client_requests_measure_the_clients_own_data(tmp_path):
    """F-Set on its shard, R-Set on the whole test set; only that client unlearns."""
    found = run(tmp_path, requests=[{"kind": "client", "target": 2}])
    rounds = table(found, "rounds")
    served = rounds[rounds["method"] != "shared"]
    assert (served["retain_accuracy"] == served["test_accuracy"]).all()
    own = table(found, "partitions").query("client_id == 2")["num_samples"].sum()
    assert np.allclose((served["forget_accuracy"] * own).round() / own, served["forget_accuracy"])
    last = served.dropna(subset=["forget_accuracy_train"])
    assert (last["forget_accuracy_train"] == last["forget_accuracy"]).all()
    taking_part = table(found, "clients").groupby(["method", "phase"])["client_id"].apply(set)
    assert taking_part["quickdrop", "unlearn"] == {2}
    assert 2 not in taking_part["quickdrop", "recover"]
    assert 2 not in taking_part["retrain", "unlearn"]


def test_sequences_partial_participation_and_finetuning(tmp_path, monkeypatch):
    """Two requests in turn, half the clients in training, one fresh network: rows for all of it."""
    from qdsim.algorithms import distillation

    monkeypatch.setattr(distillation, "FINETUNE_STEPS", 2)
    two = [{"kind": "class", "target": 9}, {"kind": "class", "target": 3}]
    found = run(
        tmp_path,
        requests=two,
        sequence=True,
        methods=["quickdrop"],
        synthetic={"finetune": 1},
        train={"participation": 0.5},
    )
    rounds = table(found, "rounds").set_index(["method", "request", "phase"]).sort_index()
    assert set(rounds.index) == {
        ("shared", "", "train"),
        ("shared", "", "finetune"),
        *[("quickdrop", r, p) for r in ("1:class:9", "2:class:3") for p in ("unlearn", "recover")],
    }
    assert (rounds.loc[("shared", "", "train"), "participants_received"] == 5).all()
    trained = rounds.loc[("shared", "", "train")].query("round == 3")["params_sha256"].item()
    assert rounds.loc[[("shared", "", "finetune")], "params_sha256"].item() == trained
    parts = table(found, "partitions")
    kept = parts[~parts["class"].isin([9, 3])]["num_synthetic"].sum()
    assert (rounds.loc[("quickdrop", "2:class:3", "recover"), "data_size"] == 2 * kept).all()
    shown = summary.stage_table(found)[["request", "method", "phase"]].to_numpy().tolist()
    first, second = "1:class:9", "2:class:3"
    assert shown == [
        [first, "shared", "train"],  # only the first request starts from the trained model
        [first, "quickdrop", "unlearn"],
        [first, "quickdrop", "recover"],
        [second, "quickdrop", "unlearn"],
        [second, "quickdrop", "recover"],
    ]


def test_pixels_that_diverge_are_noticed_in_training(tmp_path):
    """η_S = 1e25: the first client that trains is named, with the setting to lower."""
    with pytest.raises(ClientFailed, match=r"failed in train, round 1.*lower synthetic\.lr"):
        run(tmp_path, synthetic={"lr": 1e25})


def test_ten_requests_in_a_row_are_shown_in_their_order():
    """2 comes before 10."""
    assert sorted(["10:class:6", "1:class:5", "2:class:8"], key=summary._position)[-1] == "10:class:6"


def test_a_run_that_diverges_says_so_and_keeps_its_rows(tmp_path):
    """A learning rate of 1e30: client 0 is named, the manifest says failed, the tables can be read."""
    with pytest.raises(ClientFailed, match=r"client 0 failed in train, round 1.*lower the phase's lr"):
        run(tmp_path, train={"lr": 1e30})
    (found,) = tmp_path.iterdir()
    manifest = read_manifest(found)
    assert (manifest["state"], manifest["exit_code"]) == ("failed", 4)
    assert len(table(found, "rounds")) == 0
    assert len(table(found, "partitions")) == 100
