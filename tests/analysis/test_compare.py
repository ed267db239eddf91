"""What is compared with what, and how it is summed up: figures calculated by hand."""

import pytest

from analysis import compare, load
from analysis.outputs import text
from tests.analysis.made import made_run

RETRAIN = {"unlearn": [(40.0, 0.0, 0.5), (30.0, 0.0, 0.695), (30.0, 0.0, 0.7)]}
QUICKDROP = {
    "unlearn": [(1.0, 0.02, 0.4)],
    "recover": [(2.0, 0.01, 0.6), (2.0, 0.0, 0.65)],
    "relearn": [(2.0, 0.6, 0.6)],
}


def outcome(table, method, seed=0):
    own = table[(table["method"] == method) & (table["seed"] == seed)]
    assert len(own) == 1
    return own.iloc[0]


def test_speedups_count_unlearning_and_recovery_and_leave_relearning_out(tmp_path):
    """Retraining 40+30+30 = 100 s, QuickDrop 1+2+2 = 5 s: 20 times. Samples 3 x 100 against 3 x 100: once."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP})
    own = outcome(compare.outcomes(load(tmp_path).sound), "quickdrop")
    assert own["total.client_compute_s"] == 5
    assert own["speedup.client_compute_s"] == 20
    assert own["speedup.critical_path_s"] == 20
    assert own["speedup.samples"] == 1


def test_retraining_to_convergence_ends_at_the_round_within_one_point(tmp_path):
    """69.5 % in round 2 is within a point of the last 70 %: 40+30 = 70 s against 5 s are 14 times; samples 2/3."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP})
    own = outcome(compare.outcomes(load(tmp_path).sound), "quickdrop")
    assert own["converged.client_compute_s"] == 14
    assert own["converged.samples"] == pytest.approx(200 / 300)
    assert outcome(compare.outcomes(load(tmp_path).sound), "retrain")["converged.client_compute_s"] == 1


def test_the_final_accuracy_is_that_of_recovery_or_of_unlearning_where_there_is_none(tmp_path):
    """QuickDrop ends at 65 % after recovery, not at 60 % after relearning; retraining at 70 %."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP})
    table = compare.outcomes(load(tmp_path).sound)
    assert outcome(table, "quickdrop")["final.retain_accuracy"] == 0.65
    assert outcome(table, "quickdrop")["relearn.forget_accuracy"] == 0.6
    assert outcome(table, "quickdrop")["before.forget_accuracy"] == 0.5
    assert outcome(table, "retrain")["final.retain_accuracy"] == 0.7


@pytest.mark.parametrize("other", [{"shards": "q"}, {"train": {"rounds": 3}}], ids=["partition", "setting"])
def test_an_oracle_of_another_partition_or_setting_is_no_oracle(tmp_path, other):
    """Retraining of the same seed on other shards, or after another training, gives no speed-up."""
    made_run(tmp_path, {"quickdrop": QUICKDROP})
    made_run(tmp_path, {"retrain": RETRAIN}, run="2", **other)
    assert compare.outcomes(load(tmp_path).sound)["speedup.client_compute_s"].count() == 1  # retraining against itself
    assert outcome(compare.outcomes(load(tmp_path).sound), "quickdrop").isna()["speedup.client_compute_s"]


def test_methods_of_two_runs_of_one_setting_meet(tmp_path):
    """The same seed, partition and setting in another run of the job: 100 s against 5 s."""
    made_run(tmp_path, {"quickdrop": QUICKDROP})
    made_run(tmp_path, {"retrain": RETRAIN}, run="2")
    assert outcome(compare.outcomes(load(tmp_path).sound), "quickdrop")["speedup.client_compute_s"] == 20


def test_the_newest_of_two_runs_of_the_same_counts(tmp_path):
    """Not both: a seed that was run twice is one seed."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, run="1")
    made_run(tmp_path, {"quickdrop": {"unlearn": [(9.0, 0.0, 0.3)]}}, run="2")
    assert outcome(compare.outcomes(load(tmp_path).sound), "quickdrop")["total.client_compute_s"] == 9


@pytest.mark.parametrize("changes", [{"state": "running"}, {"state": "failed"}, {"received": 1}])
def test_runs_that_are_not_whole_are_left_out_and_named(tmp_path, changes):
    """Running, failed, or with one of two participants missing."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, **changes)
    results = load(tmp_path)
    assert compare.outcomes(results.sound).empty
    assert len(results.problems) == 1
    assert "made-1" in results.problems[0]
    assert len(compare.outcomes(results.only(["made-1"]))) == 1  # by itself it is shown


def test_a_request_that_is_being_served_has_no_cost_yet(tmp_path):
    """QuickDrop has unlearned and not recovered: 1 s would be 100 times; retraining has no recovery to come."""
    made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": {"unlearn": QUICKDROP["unlearn"]}}, state="running")
    table = compare.outcomes(load(tmp_path))
    assert outcome(table, "quickdrop").isna()[["total.client_compute_s", "speedup.client_compute_s"]].all()
    assert outcome(table, "retrain")["total.client_compute_s"] == 100


def test_two_jobs_of_one_setting_do_not_add_up(tmp_path):
    """Both retrained in 70 s to convergence; QuickDrop's 5 s are 14 times less, not 28."""
    for job in ("table2_cifar10", "fig3_membership"):
        made_run(tmp_path, {"retrain": RETRAIN, "quickdrop": QUICKDROP}, job=job)
    table = compare.outcomes(load(tmp_path).sound)
    assert table[table["method"] == "quickdrop"]["converged.client_compute_s"].tolist() == [14, 14]


def test_seconds_of_another_machine_are_not_compared(tmp_path):
    """Samples are: 300 against 300."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, hardware={"cpus": 2})
    made_run(tmp_path, {"retrain": RETRAIN}, run="2", hardware={"cpus": 64, "gpus": ["H100"]})
    own = outcome(compare.outcomes(load(tmp_path).sound), "quickdrop")
    assert own.isna()["speedup.client_compute_s"]
    assert own["speedup.samples"] == 1


def test_a_method_without_a_seed_in_common_is_left_out_alone(tmp_path):
    """SGA-Or ran seed 2 only: the other two keep their seeds 0 and 1."""
    made_run(tmp_path, {"quickdrop": QUICKDROP, "retrain": RETRAIN}, seeds=(0, 1))
    made_run(tmp_path, {"sga": QUICKDROP}, run="2", seeds=(2,))
    kept, notes = compare.paired(compare.outcomes(load(tmp_path).sound))
    assert sorted(set(kept["method"])) == ["quickdrop", "retrain"]
    assert len(kept) == 4
    assert notes == ["sga left out: no seed in common with retrain"]


def test_seeds_that_one_method_lacks_are_left_out_for_all(tmp_path):
    """QuickDrop has seeds 0 and 1, retraining only 0: seed 1 takes no part, and the note says so."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, seeds=(0, 1))
    made_run(tmp_path, {"retrain": RETRAIN}, run="2")
    kept, notes = compare.paired(compare.outcomes(load(tmp_path).sound))
    assert sorted(kept["seed"]) == [0, 0]
    assert notes == ["seeds [1] left out: not every method has them"]


def test_mean_deviation_and_number_of_seeds(tmp_path):
    """Totals 5 and 5+3 = 8 s over two seeds: mean 6.5, deviation 3/√2 = 2.1213, n = 2."""
    made_run(tmp_path, {"quickdrop": QUICKDROP}, seeds=(0, 1), per_seed_s=1.0)
    table = compare.summarize(compare.outcomes(load(tmp_path).sound), ["method"], ["total.client_compute_s"])
    assert table.iloc[0]["mean"] == 6.5
    assert table.iloc[0]["sd"] == pytest.approx(2.1213, abs=1e-4)
    assert table.iloc[0]["n"] == 2


def test_a_single_seed_has_no_deviation(tmp_path):
    """Null, and not zero: it was not measured."""
    made_run(tmp_path, {"quickdrop": QUICKDROP})
    table = compare.summarize(compare.outcomes(load(tmp_path).sound), ["method"], ["final.retain_accuracy"])
    assert table["sd"].isna().all()


def test_the_papers_values_stand_beside_ours():
    """Table 2 has QuickDrop at 70.48 % and 463.7 times; percentages become fractions."""
    assert compare.paper_value("Table 2", "quickdrop", "recover.retain_accuracy") == pytest.approx(0.7048)
    assert compare.paper_value("Table 2", "quickdrop", "converged.client_compute_s") == 463.7
    assert compare.paper_value("Table 2", "quickdrop", "no such column") is None


def test_each_value_of_the_paper_has_its_place():
    """No two values for one place, and every one says where it is from; totals agree with their parts."""
    table = compare.paper()
    assert not table.duplicated(["where", "row", "column"]).any()
    assert table[["where", "row", "column", "value", "unit", "source"]].notna().all().all()
    two = table[table["where"] == "Table 2"].pivot_table(index="row", columns="column", values="number")
    parts = two["unlearn.client_compute_s"] + two["recover.client_compute_s"].fillna(0)
    assert parts.to_dict() == pytest.approx(two["total.client_compute_s"].to_dict(), abs=0.011)
    times = two.loc["retrain", "total.client_compute_s"] / two["total.client_compute_s"]
    assert times.to_dict() == pytest.approx(
        two["converged.client_compute_s"].to_dict(), abs=0.1
    )  # 463.78 is printed as 463.7


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("percent", 0.7048, "70.48"),
        ("times", 463.7, "464×"),
        ("times", 7.13, "7.1×"),
        ("times", 0.042, "0.042×"),
        ("count", 45000.0, "45,000"),
        ("count", 2.5, "2.5"),
        ("seconds", 15.61, "15.61"),
        ("seconds", 7239.58, "7,240"),
        ("bytes", 1_280_000.0, "1.3 MB"),
        ("percent", float("nan"), "—"),
    ],
)
def test_figures_are_written_in_their_units(kind, value, expected):
    """Percent, times, counts, seconds, bytes; a dash where there is none."""
    assert text(kind, value) == expected
