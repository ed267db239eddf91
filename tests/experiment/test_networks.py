"""Networks other than the ConvNet, from the job to the tables."""

import numpy as np
import pytest

from qdsim.errors import BadInput
from tests.runs import run, table

CLASS_METHODS = ["quickdrop", "retrain", "sga", "federaser", "fump"]


def model(kind, **options):
    return {"kind": kind, "options": options}


def test_every_method_serves_a_residual_network(tmp_path):
    """QuickDrop's synthetic sets, FedEraser's replay and FU-MP's pruning of the inner channels; two clients, inline."""
    resnet = model("resnet", width=4)
    done = run(tmp_path, methods=CLASS_METHODS, model=resnet, partition={"kind": "iid", "clients": 2})
    stages = table(done, "stages")
    assert set(stages["method"]) == {"shared", *CLASS_METHODS}
    assert stages.query("method == 'fump' and phase == 'unlearn'")["samples"].iloc[0] > 0
    rounds = table(done, "rounds").query("method != 'sga'")  # whose second ascent may stop before its first step
    assert len(set(rounds["params_sha256"])) == len(rounds)


def test_a_training_is_found_again_by_its_network(tmp_path):
    """The same network takes the stored training; another width of it trains anew."""
    for width, reused in ((4, False), (4, True), (8, False)):
        done = run(tmp_path, methods=["retrain"], model=model("mlp", hidden=[width]))
        assert table(done, "rounds").query("phase == 'train'")["reused"].tolist() == [reused] * 3


def test_the_convnet_by_autograd_reaches_the_same_model(tmp_path):
    """float32, every phase of QuickDrop: parameters agree to 1e-4, accuracies to one test sample of 360."""
    one, other = (
        run(tmp_path / name, methods=["quickdrop"], model={"gradients": name}) for name in ("auto", "autograd")
    )
    assert not set(table(one, "rounds")["params_sha256"]) & set(table(other, "rounds")["params_sha256"])
    (left,), (right,) = (list((done / "models").glob("*.npz")) for done in (one, other))
    with np.load(left) as a, np.load(right) as b:
        names = [name for name in a.files if a[name].ndim]
        assert len(names) > 5
        assert max(np.abs(a[name] - b[name]).max() for name in names if a[name].dtype == np.float32) < 1e-4
    accuracies = [table(done, "rounds")["retain_accuracy"].dropna().to_numpy() for done in (one, other)]
    assert np.abs(accuracies[0] - accuracies[1]).max() <= 1.01 / 300


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": model("mlp"), "methods": ["fump"]}, "model.kind = 'mlp': FU-MP cannot serve it: it prunes channels"),
        ({"model": model("lenet")}, r"building lenet fails: ValueError: images have 8x8 pixels; LeNet takes 12x12"),
        ({"model": model("resnet", wide=3)}, r"model.options = {wide = 3}: resnet takes width, depth, not wide"),
        ({"model": model("mlp"), "cluster": {"compile": True}}, "cluster.compile = true: acts on the ConvNet's own"),
        ({"model": {"gradients": "autograd"}, "cluster": {"winograd": "always"}}, "cluster.winograd = 'always': acts"),
    ],
)
def test_what_a_network_cannot_do_is_said_before_anything_runs(tmp_path, settings, said):
    """The key, the network and the way out."""
    with pytest.raises(BadInput, match=said):
        run(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
