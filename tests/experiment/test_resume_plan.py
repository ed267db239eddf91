"""What is left of a run, over cases made by hand."""

import pytest

from qdsim.experiment.plan import PhaseKey
from qdsim.experiment.resume import Continue, Cursor, Outputs, Run, Skip, is_served, plan_request, plan_training


def key(phase: str, method: str = "quickdrop", request: str = "class:9", seed: int = 0) -> PhaseKey:
    return PhaseKey(seed, "", method, request, phase)


UNLEARN, RECOVER, RELEARN = (key(phase) for phase in ("unlearn", "recover", "relearn"))
ATTACK = "membership/seed-0-quickdrop-class:9-recover-loss_threshold"
SERVED = Outputs((UNLEARN, RECOVER, RELEARN), "models/seed-0-quickdrop-class:9", (ATTACK,))
EVERYTHING = set(SERVED.names)
TRAIN, FINETUNE = key("train", "shared", ""), key("finetune", "shared", "")


def test_the_outputs_of_a_request_by_name():
    """Its model, a part of the table stages for each phase, a part of the table membership for each attack."""
    stages = {f"stages/seed-0-quickdrop-class:9-{phase}" for phase in ("unlearn", "recover", "relearn")}
    assert {"models/seed-0-quickdrop-class:9", ATTACK, *stages} == EVERYTHING


def test_a_run_that_begins_runs_everything():
    """Nothing is written, nothing is committed."""
    assert plan_request(SERVED, commit=None, written=()) == (Run(), Run(), Run())
    assert plan_training([TRAIN, FINETUNE], commit=None) == (Run(), Run())


def test_a_request_that_was_served_is_skipped():
    """Whatever the commit says."""
    assert is_served(SERVED, EVERYTHING)
    assert plan_request(SERVED, commit=None, written=EVERYTHING) == (Skip(), Skip(), Skip())
    assert plan_request(SERVED, commit=Cursor(RECOVER, 1), written=EVERYTHING) == (Skip(), Skip(), Skip())


@pytest.mark.parametrize("missing", sorted(EVERYTHING))
def test_with_any_output_missing_it_is_not_served(missing):
    """And without a commit it is served from its beginning."""
    left = EVERYTHING - {missing}
    assert not is_served(SERVED, left)
    assert plan_request(SERVED, commit=None, written=left) == (Run(), Run(), Run())


def test_a_commit_is_continued_from():
    """Stopped after round 2 of recovery: unlearning is done, relearning is to come."""
    written = {f"stages/{UNLEARN.part}"}
    assert plan_request(SERVED, commit=Cursor(RECOVER, 2), written=written) == (Skip(), Continue(2), Run())
    assert plan_request(SERVED, commit=Cursor(UNLEARN, 1), written=()) == (Continue(1), Run(), Run())


def test_rows_that_are_gone_send_a_request_back_to_its_beginning():
    """The commit is of recovery, and the row of unlearning is missing."""
    assert plan_request(SERVED, commit=Cursor(RECOVER, 2), written=()) == (Run(), Run(), Run())


@pytest.mark.parametrize(
    "other", [key("recover", "retrain"), key("recover", request="class:8"), key("recover", seed=1)]
)
def test_a_commit_of_another_task_is_not_taken(other):
    """Another method, request or seed."""
    assert plan_request(SERVED, commit=Cursor(other, 1), written=()) == (Run(), Run(), Run())


def test_a_request_with_nothing_left_to_train_on_has_a_model_alone():
    """The last class of a sequence: no phase, and served once its model is written."""
    empty = Outputs((), "models/seed-0-quickdrop-10:class:6")
    assert not is_served(empty, ())
    assert is_served(empty, {"models/seed-0-quickdrop-10:class:6"})
    assert plan_request(empty, commit=None, written=()) == ()


def test_training_takes_what_is_stored():
    """A stored training without fine-tuning: that is left; a stored one with it: nothing is."""
    assert plan_training([TRAIN, FINETUNE], commit=None, stored_phases=1) == (Skip(), Run())
    assert plan_training([TRAIN, FINETUNE], commit=None, stored_phases=2) == (Skip(), Skip())


def test_training_goes_on_from_a_commit_that_is_further_than_what_is_stored():
    """In training with nothing stored; in fine-tuning, whether training is stored or lies in this run alone."""
    assert plan_training([TRAIN, FINETUNE], commit=Cursor(TRAIN, 3)) == (Continue(3), Run())
    for stored_phases in (0, 1):
        plan = plan_training([TRAIN, FINETUNE], commit=Cursor(FINETUNE, 1), stored_phases=stored_phases)
        assert plan == (Skip(), Continue(1))


def test_a_commit_that_is_behind_what_is_stored_is_not_taken():
    """Another run has stored the training meanwhile."""
    assert plan_training([TRAIN, FINETUNE], commit=Cursor(TRAIN, 3), stored_phases=1) == (Skip(), Run())


def test_without_its_client_states_a_commit_is_worth_nothing():
    """The model of round 3 with synthetic sets of the beginning would be another run."""
    assert plan_training([TRAIN], commit=Cursor(TRAIN, 3), states_readable=False) == (Run(),)
