"""The job files: every experiment of the paper, with the paper's settings, and what profiles may change."""

import re

import pytest

from qdsim.data import datasets
from qdsim.experiment import config, plan
from qdsim.models.convnet import ConvNet
from tests.conftest import PROJECT

JOBS = sorted((PROJECT / "jobs").glob("*.toml"))
CLASS_METHODS = ("quickdrop", "retrain", "sga", "federaser", "fump")
CLIENT_METHODS = ("quickdrop", "retrain", "sga", "federaser", "s2u")
QUICKDROP = ("quickdrop",)
PAPER = {
    # job: data set, clients, methods, kind of request
    "table2_cifar10": ("cifar10", 10, CLASS_METHODS, "class"),
    "table3_svhn_100": ("svhn+extra", 100, CLASS_METHODS, "class"),
    "table4_client_noniid": ("cifar10", 20, CLIENT_METHODS, "client"),
    "table4_client_iid": ("cifar10", 20, CLIENT_METHODS, "client"),
    "table5_cifar10_20": ("cifar10", 20, CLASS_METHODS, "class"),
    "table5_mnist_20": ("mnist", 20, CLASS_METHODS, "class"),
    "table6_overhead": ("cifar10", 10, QUICKDROP, "class"),
    "fig2_class_accuracy": ("cifar10", 10, QUICKDROP, "class"),
    "fig3_membership": ("cifar10", 10, CLASS_METHODS, "class"),
    "fig4_sequential": ("cifar10", 10, QUICKDROP, "class"),
    "fig5_finetune": ("cifar10", 10, QUICKDROP, "class"),
    "fig6_scale": ("cifar10", 10, QUICKDROP, "class"),
    "client_alpha": ("cifar10", 20, CLIENT_METHODS, "client"),
    "ablation_matching": ("cifar10", 10, QUICKDROP, "class"),
}


def load(name, profile=None):
    return config.load(PROJECT / "jobs" / f"{name}.toml", profile=profile)


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_every_job_opens_with_its_command_its_hardware_and_its_duration(path):
    """The first line runs the job; the name is the file's; ``about`` says what it reproduces."""
    first, *rest = path.read_text(encoding="utf-8").splitlines()
    assert first.startswith(f"# qdsim run jobs/{path.name}")
    comments = " ".join(line for line in rest if line.startswith("#"))
    assert "Hardware: " in comments
    laptop = next(line for line in rest if "two cores" in line)
    assert re.search(r"\d+ (minutes|hours)|a minute|an hour", laptop)
    job = config.load(path)
    assert job.name == path.stem
    assert job.about


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
@pytest.mark.parametrize("profile", ["laptop", "smoke"])
def test_profiles_keep_what_is_asked(path, profile):
    """Neither the data set nor clients, α, methods or requests change; seeds and sweeps only get shorter."""
    whole, small = config.load(path), config.load(path, profile=profile)
    for key in ("data", "partition", "methods", "requests", "sequence", "membership", "name"):
        assert getattr(small, key) == getattr(whole, key)
    assert set(small.seeds) <= set(whole.seeds)
    assert set(small.sweep) == set(whole.sweep)
    assert len(small.sweep_points()) <= len(whole.sweep_points())


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings(name):
    """§4.1: K = 200, T = 50, batch 256, rates 0.01 / 0.02 / 0.01, s = 100, W = 128, five seeds, α = 0.1."""
    dataset, clients, methods, kind = PAPER[name]
    job = load(name)
    assert (job.data.dataset, job.partition.clients, job.methods) == (dataset, clients, methods)
    assert {request.kind for request in job.requests} == {kind}
    assert (job.train.rounds, job.train.steps, job.train.batch_size, job.train.lr) == (200, 50, 256, 0.01)
    assert (job.unlearn.rounds, job.unlearn.lr, job.recover.lr) == (1, 0.02, 0.01)
    assert (job.model.width, job.model.depth, job.synthetic.scale, job.synthetic.lr) == (128, 3, 100, 0.1)
    assert len(job.seeds) == 5
    assert job.partition.kind == "iid" if name == "table4_client_iid" else job.partition.alpha == 0.1
    if name in ("fig2_class_accuracy", "fig4_sequential"):
        assert job.recover.rounds == 4
    else:
        assert job.recover.rounds == 2
    if kind == "client":
        assert job.requests[0].target == "random"


def test_profiles_leave_short_sweeps_alone_and_one_value_beats_the_list(tmp_path):
    """laptop puts three scales in the place of seven, not of two; --set of one value ends the sweep over it."""
    path = PROJECT / "jobs" / "fig6_scale.toml"
    two = config.load(path, profile="laptop", overrides=["sweep.synthetic.scale=[5, 7]"])
    assert two.sweep == {"synthetic.scale": [5, 7]}
    whole = config.load(path, overrides=['sweep={"synthetic.scale"=[5]}'])
    assert whole.sweep == {"synthetic.scale": [5]}
    one = config.load(path, profile="laptop", overrides=["synthetic.scale=50"])
    assert (one.sweep, one.synthetic.scale) == ({}, 50)


def test_what_makes_each_figure():
    """Orders, sweeps, participation and attacks of the paper, and their laptop versions."""
    assert [r.target for r in load("fig4_sequential").requests] == [5, 8, 0, 3, 2, 4, 7, 9, 1, 6]
    assert load("fig4_sequential").sequence
    assert load("fig5_finetune").sweep == {"synthetic.finetune": [0, 20, 50, 100, 200]}
    assert load("fig5_finetune", "laptop").sweep == {"synthetic.finetune": [0, 1, 2, 4]}
    assert load("fig6_scale").sweep == {"synthetic.scale": [1, 10, 50, 100, 200, 500, 1000]}
    assert load("fig6_scale", "laptop").sweep == {"synthetic.scale": [10, 100, 1000]}
    assert load("client_alpha").sweep == {"partition.alpha": [0.1, 1.0, 10.0]}
    assert load("client_alpha", "laptop").sweep == {"partition.alpha": [0.1, 10.0]}
    assert load("ablation_matching").sweep == {"synthetic.matching": [True, False]}
    assert load("fig3_membership").membership == ("loss_threshold", "entropy_svm")
    svhn = load("table3_svhn_100")
    assert (svhn.train.participation, svhn.recover.participation, svhn.unlearn.participation) == (0.1, 0.1, 1.0)
    for name in ("table5_cifar10_20", "table5_mnist_20"):
        assert load(name).relearn.rounds > 0


SHARING = ["table2_cifar10", "fig2_class_accuracy", "fig3_membership", "fig4_sequential", "ablation_matching"]


@pytest.mark.parametrize("profile", [None, "laptop"])
def test_the_jobs_on_one_federation_share_their_training(profile):
    """Every field that training depends on is equal, with fig5 at F = 0 and fig6 at s = 100 among them."""
    jobs = [load(name, profile) for name in SHARING]
    jobs += [dict(load("fig5_finetune", profile).sweep_points())["synthetic.finetune=0"]]
    jobs += [dict(load("fig6_scale", profile).sweep_points())["synthetic.scale=100"]]
    first = jobs[0]
    for job in jobs[1:]:
        for key in ("data", "partition", "model", "train", "seeds"):
            assert getattr(job, key) == getattr(first, key)
        assert (
            job.hyperparameters(ConvNet(1, 28, 10)).synthetic == first.hyperparameters(ConvNet(1, 28, 10)).synthetic
        )  # how many are shown is no part of it


@pytest.mark.slow
def test_every_job_on_real_data_can_be_planned(real_data_root):
    """Partitions can be drawn, requests resolved and phases made for each profile, where the data are at hand."""
    loaded = {name: datasets.load(name, real_data_root) for name in ("mnist", "cifar10")}
    planned = 0
    for path in JOBS:
        for profile in (None, "laptop", "smoke"):
            job = config.load(path, profile=profile)
            if job.data.dataset in loaded:
                made = plan.build_plan(job, loaded[job.data.dataset])
                assert all(task.phases() for task in made.tasks())
                planned += 1
    assert planned == 3 * 15
