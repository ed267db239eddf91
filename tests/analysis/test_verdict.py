"""The sentence that an experiment opens with, and the table under it: every case calculated by hand."""

import json
from itertools import product

import pandas as pd
import pytest

from analysis import compare, load, page, sweep_figures, verdict
from analysis import report as reports
from analysis.load import _other_scale
from qdsim.experiment import config
from qdsim.store.run_directory import read_manifest
from tests.analysis import texts
from tests.analysis.made import made_run
from tests.conftest import PROJECT

RETRAIN = {"unlearn": [(100.0, 0.02, 0.70)]}
QUICKDROP = {"unlearn": [(1.0, 0.0, 0.4)], "recover": [(4.0, 0.02, 0.65)]}
SGA = {"unlearn": [(20.0, 0.0, 0.4)], "recover": [(20.0, 0.06, 0.71)]}
TEN = {"kind": "official", "clients": 10, "alpha": 0.1}


def said(path):
    """The verdict of the only experiment there."""
    ((_, title, own),) = reports.experiments(load(path))
    return verdict.make(own, "made-headline", title)


def test_one_method_is_set_beside_retraining(tmp_path):
    """F-Set 2 % both, R-Set 65 % against 70 %; 1 + 4 s against 100 s are 20 times less."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP})
    found = said(tmp_path)
    assert found.sentence == (
        "Compared with retraining, QuickDrop ends with the same F-Set accuracy (2.0 %) and an R-Set accuracy 5.0 "
        "points lower (65.0 % against 70.0 %), at 20.0 times less client compute (5.00 s against 100 s)."
    )
    assert found.best == {("", "quickdrop")}
    assert found.trained == {("", "class:9"): (0.5, 0.6)}


def test_of_several_the_one_with_the_fewest_points_on_both_sets(tmp_path):
    """QuickDrop is 0 + 5 points away, SGA-Or 4 + 1: as far, and dearer. With 1 point less on F-Set it is closer."""
    made_run(tmp_path / "a", {"retrain": RETRAIN, "quickdrop": QUICKDROP, "sga": SGA})
    begins = "Of 2 methods, QuickDrop comes closest to retraining (SGA-Or as close, at more cost), with "
    assert said(tmp_path / "a").sentence.startswith(begins)
    closer = {**SGA, "recover": [(20.0, 0.05, 0.71)]}
    made_run(tmp_path / "b", {"retrain": RETRAIN, "quickdrop": QUICKDROP, "sga": closer})
    assert said(tmp_path / "b").sentence == (
        "Of 2 methods, SGA-Or comes closest to retraining, with an F-Set accuracy 3.0 points higher (5.0 % against "
        "2.0 %) and an R-Set accuracy 1.0 point higher (71.0 % against 70.0 %), at 2.5 times less client compute "
        "(40.00 s against 100 s)."
    )


def test_a_method_that_costs_more_than_retraining_is_said_to(tmp_path):
    """4 s of retraining against 5 s are 1.25 times more."""
    made_run(tmp_path, {"retrain": {"unlearn": [(4.0, 0.02, 0.65)]}, "quickdrop": QUICKDROP})
    assert said(tmp_path).sentence.endswith("at 1.2 times more client compute (5.00 s against 4.00 s).")


def test_without_retraining_nothing_is_called_close(tmp_path):
    """One method: from where to where. Several: who forgot most and who kept most."""
    made_run(tmp_path / "one", {"quickdrop": QUICKDROP})
    assert said(tmp_path / "one").sentence == (
        "There is nothing to compare with, as retraining is not among the methods: QuickDrop takes F-Set accuracy from "
        "50.0 % to 2.0 % and R-Set accuracy from 60.0 % to 65.0 %, at 5.00 s of client compute."
    )
    made_run(tmp_path / "two", {"quickdrop": QUICKDROP, "sga": SGA})
    found = said(tmp_path / "two")
    assert found.sentence.endswith(
        "of 2 methods, F-Set accuracy is lowest with QuickDrop (2.0 %), R-Set accuracy is highest with SGA-Or (71.0 %)."
    )
    assert found.best == set()


def test_retraining_alone_is_said_to_be_alone(tmp_path):
    """It is no distance from itself."""
    made_run(tmp_path, {"retrain": RETRAIN})
    expected = (
        "There is only the retrained model, with F-Set accuracy 2.0 % and R-Set accuracy 70.0 %, at 100 s of client"
    )
    assert said(tmp_path).sentence.startswith(expected)


def test_several_seeds_are_means(tmp_path):
    """100 over 5 s and 101 over 7 s are 20 and 14.43 times, 17.2 in the mean; costs 6 and 100.5 s in the mean."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP}, seeds=(0, 1), per_seed_s=1.0)
    found = said(tmp_path)
    assert found.sentence.endswith("at 17.2 times less client compute (6.00 s against 100 s); means over 2 seeds.")
    assert set(found.table.figures["n"]) == {2}


@pytest.mark.parametrize(
    ("methods", "state", "expected"),
    [
        ({"retrain": {}}, "running", "The run is still going on; so far: no request has been served yet."),
        ({"quickdrop": {"unlearn": QUICKDROP["unlearn"]}}, "running",
         "The run is still going on; so far: the first request is being served."),
        ({"quickdrop": QUICKDROP, "retrain": {}}, "running",
         "The run is still going on; so far: there is nothing to compare with, as retraining of the same seed and "
         "request is not at hand: QuickDrop takes"),
        ({"quickdrop": QUICKDROP, "retrain": RETRAIN}, "failed",
         "The run failed; up to there: compared with retraining, QuickDrop ends with"),
    ],
)  # fmt: skip
def test_a_run_that_is_not_done_says_so_first(tmp_path, methods, state, expected):
    """Nothing yet, half a request, no retraining yet, and a failure after everything was served."""
    made_run(tmp_path, methods, state=state)
    assert said(tmp_path).sentence.startswith(expected)


def outcomes(rows):
    """Rows of cell, request, method, F-Set, R-Set, cost, beside retraining at 0 %, 70 % and 100 s in each."""
    places = list(dict.fromkeys(row[:2] for row in rows))
    rows = [*rows, *((cell, asked, "retrain", 0.0, 0.7, 100.0) for cell, asked in places)]
    table = pd.DataFrame(rows, columns=["cell", "asked", "method", "final.forget_accuracy", "final.retain_accuracy",
                                        verdict.COST])  # fmt: skip
    table = table.assign(job="made", setting="s", partition="p", request=table["asked"], seed=0)
    table[verdict.SPEEDUP] = 100 / table[verdict.COST]
    return table.assign(**{f"before.{score}": 0.9 for score in compare.SCORES})


def test_over_several_requests_distances_are_means_and_costs_sums():
    """1 and 3 points, one up and one down, are 2 away; 5 + 15 s against 200 s are 10 times less."""
    table = outcomes(
        [("", "class:1", "quickdrop", 0.0, 0.71, 5.0), ("", "class:2", "quickdrop", 0.0, 0.67, 15.0)],
    )
    sentence, best = verdict.judge(table, ["quickdrop", "retrain"])
    assert sentence == (
        "Compared with retraining, QuickDrop ends 0.0 points away in F-Set accuracy and 2.0 points away in R-Set "
        "accuracy on average over 2 requests, at 10.0 times less client compute (20.00 s against 200 s in all)."
    )
    assert best == {("", "quickdrop")}


def test_of_a_sweep_the_closest_setting_is_named():
    """s = 10 is 1 point away, the others 5 and 20."""
    scores = {"1": 0.65, "10": 0.69, "100": 0.5}
    table = outcomes([(f"synthetic.scale={s}", "class:1", "quickdrop", 0.0, r, 5.0) for s, r in scores.items()])
    sentence, best = verdict.judge(table, ["quickdrop", "retrain"])
    expected = "Of 3 settings, QuickDrop with synthetic.scale = 10 comes closest to retraining, with the same F-Set"
    assert sentence.startswith(expected)
    assert best == {("synthetic.scale=10", "quickdrop")}


SWEEPS = {
    "one key": {"synthetic.scale": ["1", "10", "100"]},
    "words": {"model.kind": ["convnet", "torchvision:resnet18"]},
    "two keys": {"synthetic.scale": ["1", "10", "100"], "unlearn.lr": ["0.01", "0.02"]},
    "two long keys": {"synthetic.finetune": [str(n) for n in range(10)], "partition.alpha": ["0.1", "1.0", "10.0"]},
}


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_a_sweep_has_a_figure_without_words_on_each_other(sweep):
    """Lines over one key, maps over two, for two methods and retraining."""
    cells = [",".join(f"{k}={v}" for k, v in zip(sweep, point, strict=True)) for point in product(*sweep.values())]
    rows = [
        (cell, "class:1", m, 0.1, 0.6 + i / 100, 5.0 + i) for i, cell in enumerate(cells) for m in ("quickdrop", "sga")
    ]
    (figure,) = sweep_figures.figures(outcomes(rows), "made-sweep", "The sweep", [])
    assert texts.faults(figure) == []
    assert figure.notes[0] == "after unlearning and recovery; forget class 1"


def test_two_runs_of_a_job_have_titles_that_tell_them_apart(tmp_path):
    """The setting that differs is in both."""
    for name, rounds in (("1", 2), ("2", 9)):
        made_run(tmp_path, {"quickdrop": QUICKDROP}, run=name, train={"rounds": rounds})
    titles = [title for _, title, _ in reports.experiments(load(tmp_path))]
    same = "made (CIFAR-10, 2 clients, α = 0.1"
    assert titles == [f"{same}, train.rounds = 2)", f"{same}, train.rounds = 9)"]


def test_two_unfinished_runs_of_one_setting_are_told_apart_by_their_names(tmp_path):
    """Each stands alone, and nothing else tells one from the other."""
    for name in ("1", "2"):
        made_run(tmp_path, {"quickdrop": QUICKDROP}, run=name, state="failed")
    titles = [title for _, title, _ in reports.experiments(load(tmp_path))]
    assert titles == [f"made (CIFAR-10, 2 clients, α = 0.1, failed, made-{name})" for name in ("1", "2")]


def test_at_another_scale_nothing_is_subtracted(tmp_path):
    """Two rounds of training: R-Set, seconds and speed-ups stand beside the paper's without a difference."""
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table2_cifar10", partition=TEN)
    (table,) = [i for s in reports.plan(load(tmp_path)).sections for i in s.items if i.stem == "table2_cifar10"]
    own = table.figures[table.figures["method"] == "quickdrop"].set_index("column")
    assert own.loc["recover.retain_accuracy", "paper"] == pytest.approx(0.7048)
    assert own["difference"].isna().all()
    times = own.loc["converged.client_compute_s"]
    assert times["paper"] == 463.7
    assert "the paper's sizes are others than train.rounds = 2: its values are given, and no difference is told" in (
        table.notes
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recover": {"rounds": 20}}, "recover.rounds = 20"),
        ({"unlearn": {"steps": 5}, "synthetic": {"scale": 10}}, "unlearn.steps = 5, synthetic.scale = 10"),
        ({"recover": {"participation": 0.1}}, "recover.participation = 0.1"),
        ({"partition": {"clients": 100}, "recover": {"participation": 0.1}}, ""),
        ({"partition": {"clients": 100}, "recover": {"participation": 1.0}}, "recover.participation = 1.0"),
        ({"sga": {"recover_rounds": 9}}, "sga.recover_rounds = 9"),
        ({"relearn": {"rounds": 0, "steps": 3}}, ""),
        ({"relearn": {"rounds": 1}}, "relearn.rounds = 1"),
        ({"synthetic": {"scale": 1}, "sweep": {"synthetic.scale": [1, 10]}}, ""),
        ({"train": {"lr": 0.5}, "synthetic": {"gallery": 2}}, ""),
    ],
    ids=str,
)
def test_what_another_scale_is(changes, said):
    """Whatever a phase costs, as the paper has it: of 100 clients ten take part; rates and galleries are free."""
    assert _other_scale(changes) == said


def test_the_papers_own_jobs_are_of_its_scale():
    """Those whose tables stand beside the paper's; Figure 2 recovers for longer than Table 2."""
    for path in sorted((PROJECT / "jobs").glob("*.toml")):
        own = json.loads(json.dumps(config.load(path).model_dump()))
        other = {"fig2_class_accuracy", "fig4_sequential", "recovery_steps", "quickstart"}
        assert (_other_scale(own) == "") is (path.stem not in other), path.stem


def test_at_the_papers_scale_everything_is_subtracted(tmp_path):
    """200 rounds: 20 times less the paper's 463.7."""
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, job="table2_cifar10", partition=TEN,
             train={"rounds": 200})  # fmt: skip
    (table,) = [i for s in reports.plan(load(tmp_path)).sections for i in s.items if i.stem == "table2_cifar10"]
    own = table.figures[table.figures["method"] == "quickdrop"].set_index("column")
    assert own.loc["converged.client_compute_s", "difference"] == pytest.approx(20 - 463.7)


def test_a_sweep_without_retraining_says_which_setting_kept_most():
    """Two settings of two methods: F-Set 0 % with each of the four, R-Set 90 % with one."""
    scores = {("1", "sga"): 0.8, ("1", "quickdrop"): 0.85, ("10", "sga"): 0.8, ("10", "quickdrop"): 0.9}
    rows = [(f"synthetic.scale={s}", "class:1", method, 0.0, r, 5.0) for (s, method), r in scores.items()]
    table = outcomes(rows)
    sentence, best = verdict.judge(table[table["method"] != "retrain"], ["quickdrop", "sga"])
    assert sentence == (
        "There is nothing to compare with, as retraining is not among the methods: of 2 settings and 2 methods, F-Set "
        "accuracy is 0.0 % with each of them, R-Set accuracy is highest with QuickDrop with synthetic.scale = 10 "
        "(90.0 %)."
    )
    assert best == set()


@pytest.mark.parametrize(
    ("origin", "changed", "unchanged"),
    [
        ({"changed": ["train.rounds = 7"], "set": ["train.rounds=7"]}, ["train.rounds = 7"], None),
        ({"changed": ["train.lr = 0.2"], "profile": "laptop", "set": []}, ["profile laptop", "train.lr = 0.2"], None),
        ({"changed": [], "set": []}, [], "nothing"),
        ({"changed": None, "set": []}, [], "own job file"),
        ({"changed": None, "job": "(given in Python)", "set": []}, [], "given in Python"),
        ({"set": ["train.rounds=7"]}, ["train.rounds=7"], None),  # of a version before
        ({"set": []}, [], "nothing by option"),
    ],
    ids=str,
)
def test_what_is_said_to_be_changed_in_a_job(tmp_path, origin, changed, unchanged):
    """An edited file and a dict of Python are not called unchanged."""
    path = made_run(tmp_path, {"quickdrop": QUICKDROP})
    (path / "manifest.json").write_text(json.dumps(read_manifest(path) | {"origin": origin}))
    (row,) = page._runs(load(tmp_path), [])
    assert row["changed"] == changed
    assert changed or row["unchanged"] == unchanged
