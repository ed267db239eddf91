"""Searches: what is varied, what is wanted, and a search on Ray Tune."""

import pandas as pd
import pytest

import qdsim
from qdsim.errors import BadInput
from qdsim.experiment import config
from qdsim.tuning.space import Metric, Range
from tests.cli.test_commands import qdsim as command
from tests.runs import TINY

JOB = config.validate(TINY)


def test_a_range_is_read_and_not_evaluated():
    """Ray Tune's functions by name; words, texts and lists in a choice."""
    assert Range.parse("train.lr=loguniform(0.001, 0.1)") == Range("train.lr", "loguniform", (0.001, 0.1))
    assert Range.parse("synthetic.init=choice(real, 'noise')").arguments == ("real", "noise")
    assert Range.parse("synthetic.matching=choice(true,false)").ends() == [True, False]
    assert Range.parse("recover.steps=randint(1,20)").ends() == [1, 19], "the upper bound is left out"
    assert Range.parse("recover.steps=qrandint(2,20,2)").ends() == [2, 20]
    assert Range.parse("train.lr=uniform(0,1)").ends() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("train.lr", "write KEY=KIND"),
        ("train.lr=0.1", "write KEY=KIND"),
        ("train.lr=__import__('os').system('true')", "write KEY=KIND"),
        ("train.lr=gauss(0,1)", "no such kind of range; allowed: uniform"),
        ("train.lr=uniform(0.1)", "uniform takes 2 numbers"),
        ("train.lr=uniform(open('x'),1)", "the arguments are numbers"),
        ("train.lr=uniform(0.1,0.1)", "a lower bound, then a higher one"),
        ("train.lr=loguniform(0,1)", "a lower bound above 0, then a higher one"),
        ("train.steps=randint(1.5,2)", "randint takes whole numbers"),
        ("train.steps=choice()", "list at least one value"),
        ("train.steps=qrandint(1,10,0)", "qrandint takes a step above 0 as its third number"),
        ("train.lr=quniform(0.1,1,-1)", "quniform takes a step above 0"),
        ("train.lr=qloguniform(0.1,1,0.0)", "qloguniform takes a step above 0"),
    ],
)
def test_a_range_that_is_wrong_is_refused(text, why):
    """One line that says how to write it."""
    with pytest.raises(BadInput, match=r"^--over = ") as raised:
        Range.parse(text)
    assert why in str(raised.value)


def test_a_metric_is_a_sum_of_means():
    """Of two seeds: recover.retain (0.8 + 0.6) / 2 − unlearn.forget (0.1 + 0.3) / 2 = 0.7 − 0.2."""
    rows = [
        ("quickdrop", "recover", 0.8, 0.0),
        ("quickdrop", "recover", 0.6, 0.0),
        ("quickdrop", "unlearn", 0.2, 0.1),
        ("quickdrop", "unlearn", 0.2, 0.3),
        ("retrain", "unlearn", 0.9, 0.0),
        ("shared", "train", None, None),
    ]
    stages = pd.DataFrame(rows, columns=["method", "phase", "retain_accuracy", "forget_accuracy"])
    metric = Metric.parse("recover.retain_accuracy - quickdrop.unlearn.forget_accuracy", JOB)
    assert metric.value(stages) == pytest.approx(0.5)
    assert Metric.parse("retrain.unlearn.retain_accuracy", JOB).value(stages) == pytest.approx(0.9)
    assert Metric.parse("train.wall_s", JOB).terms[0].method == "shared"
    with pytest.raises(BadInput, match="the run has no retain_accuracy of shared in the phase train"):
        Metric.parse("train.retain_accuracy", JOB).value(stages)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("accuracy", "write PHASE.COLUMN"),
        ("forget.retain_accuracy", "phases are train, finetune, unlearn, recover, relearn"),
        ("recover.accuracy", "no such column of the table stages"),
        ("sga.recover.retain_accuracy", "methods of the job are quickdrop, retrain"),
    ],
)
def test_a_metric_that_is_wrong_is_refused(text, why):
    """One line."""
    with pytest.raises(BadInput, match=r"^--metric = ") as raised:
        Metric.parse(text, JOB)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ("train.lr=uniform(-1,1)", "train.lr = -1.0"),
        ("train.rate=uniform(0,1)", "train.rate = 0.0: unknown key"),
        ("cluster.threads=randint(1,4)", "a search varies none of name, cluster, sweep"),
    ],
)
def test_a_search_is_checked_before_anything_starts(over, why, tmp_path):
    """The ends of a range against the job, with exit code 2 and no folder."""
    arguments = ["--over", over, "--metric", "recover.retain_accuracy", "--out", tmp_path / "out"]
    done = command("tune", "quickstart", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("qdsim: ")
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_search_trains_once_and_finds_the_best(tmp_path, cluster_address):
    """Two trials over the recovery at a time: one folder, one training, and the better one first."""
    pytest.importorskip("optuna")
    values = {**TINY, "methods": ["quickdrop"]}
    found = qdsim.tune(
        values,
        over={"recover.lr": "loguniform(0.001, 0.5)", "recover.steps": "randint(1, 4)"},
        metric="recover.retain_accuracy",
        trials=2,
        concurrent=2,
        search="optuna",
        out=tmp_path,
        engine="inline",
        address=cluster_address,
    )
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [found.path.name]
    runs = [qdsim.load(path.parent) for path in found.path.glob("*/manifest.json")]
    assert len(runs) == 2
    trained = [run.stages.loc[run.stages["phase"] == "train", "reused"].all() for run in runs]
    assert sorted(map(bool, trained)) == [False, True]
    scores = {run.path.name: run.stages.set_index("phase").loc["recover", "retain_accuracy"] for run in runs}
    assert dict(zip(found.trials["run"], found.trials[found.metric], strict=True)) == pytest.approx(scores)
    assert found.trials[found.metric].is_monotonic_decreasing
    assert scores[found.best_run.path.name] == max(scores.values())
    settings = found.best_run.manifest["config"]["recover"]
    assert (settings["lr"], settings["steps"]) == (found.best["recover.lr"], found.best["recover.steps"])
    assert len(pd.read_csv(found.path / "trials.csv")) == 2
