"""The rule of convergence, and what the tables say of it."""

from itertools import pairwise

import numpy as np
import pytest

from qdsim.algorithms.stopping import FORGOT, RECOVERED, RETRAINED, SETTLED, Rule
from tests.runs import run, table


@pytest.mark.parametrize(
    ("rule", "scores", "over"),
    [
        (FORGOT, [0.9, 0.02], False),
        (FORGOT, [0.9, 0.01], True),
        (FORGOT, [0.0], False),  # before the phase: at least one round is run
        (RECOVERED, [0.5, 0.8, 0.804], False),  # gained 0.3 in two rounds
        (RECOVERED, [0.5, 0.8, 0.804, 0.803], True),  # gained 0.004 in two
        (RECOVERED, [0.5, 0.8, 0.804, 0.806], False),  # gained 0.006 in two
        (RECOVERED, [0.8, 0.7], False),  # one round is no two
        (RECOVERED, [0.8, 0.7, 0.7], True),  # lost
        (RECOVERED, [None, 0.7, 0.7], False),  # nothing to compare with
        (RETRAINED, [None, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5], False),  # the best of the last five against 0.1
        (RETRAINED, [None, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], True),  # and against 0.5
        (RETRAINED, [None, 0.5, 0.4, 0.4, 0.4, 0.4, 0.6], False),
        (SETTLED, [None, 2.0], False),  # one loss is no fall
        (SETTLED, [None, 2.0, 1.89], False),  # fell by 5.5 %
        (SETTLED, [None, 2.0, 1.5, 1.43], True),  # fell by 4.7 %
        (SETTLED, [None, 2.0, 2.5], True),  # rose
    ],
)
def test_the_rules_by_hand(rule, scores, over):
    """Forgotten at 1 %; converged when the last 1 or 5 rounds gained less than half a point."""
    assert rule.reached(scores) is over


def test_a_rule_says_itself():
    """As the table stages has it."""
    assert str(FORGOT) == "forget_accuracy <= 0.01"
    assert str(SETTLED) == "start_loss falls by < 5%"
    assert str(Rule("retain_accuracy", patience=5)) == "retain_accuracy gains < 0.005 in 5 rounds"


def test_stages_by_convergence(tmp_path):
    """A stage with a rule may end early; the table says by which, after how many rounds and of how many."""
    stop = {"stop": "converged"}
    found = run(
        tmp_path,
        methods=["quickdrop", "sga"],
        train={"rounds": 4},
        unlearn={"rounds": 3, "steps": 20, "lr": 0.5, **stop},
        recover={"rounds": 9, **stop},
        relearn={"rounds": 9, "data": "mixed", **stop},
    )
    stages = table(found, "stages").set_index(["method", "phase"])
    rounds = table(found, "rounds").groupby(["method", "phase"])["round"].max()
    assert (stages["rounds_run"] == rounds.reindex(stages.index)).all()
    assert (stages["rounds_run"] <= stages["max_rounds"]).all()
    assert stages.loc[("shared", "train"), "stop_reason"] == "rounds"
    unlearn = stages.loc[("quickdrop", "unlearn")]
    assert unlearn["stop_reason"] == "converged: forget_accuracy <= 0.01"
    assert (unlearn["rounds_run"], unlearn["max_rounds"]) == (1, 3)
    recover = stages.loc[("quickdrop", "recover")]
    assert recover["stop_reason"].endswith("retain_accuracy gains < 0.005 in 2 rounds")
    assert recover["stop_reason"].startswith("converged") == (recover["rounds_run"] < 9)
    assert stages.loc[("sga", "recover"), "stop_reason"].endswith("in 2 rounds")
    # accuracies on the clients' own data stand at the end of a phase, early or not
    ends = table(found, "rounds").dropna(subset=["forget_accuracy_train"]).set_index(["method", "phase"])["round"]
    served = stages.drop(index=("shared", "train"))
    assert (ends.reindex(served.index) == served["rounds_run"]).all()


def test_recovery_that_ends_by_the_clients_losses(tmp_path):
    """No test data: each round's first losses are of the model before it, and the rule's own words stand in stages.

    A round's ``start_loss`` is the mean of the clients' first losses weighted by |Z_i|. With one step a round it is the
    weighted mean of their losses, so the table ``clients`` has it as well.
    """
    found = run(tmp_path, train={"rounds": 4}, recover={"rounds": 30, "steps": 1, "lr": 0.1, "stop": "loss"})
    stage = table(found, "stages").set_index(["method", "phase"]).loc[("quickdrop", "recover")]
    rounds = table(found, "rounds")
    losses = rounds[rounds["phase"] == "recover"].sort_values("round")["start_loss"].tolist()
    assert stage["stop_reason"] == "converged: start_loss falls by < 5%"
    assert stage["rounds_run"] == len(losses) < 30
    falls = [1 - later / earlier for earlier, later in pairwise(losses)]
    assert falls[-1] < 0.05
    assert all(fall >= 0.05 for fall in falls[:-1])
    clients = table(found, "clients")
    own = clients[(clients["phase"] == "recover") & (clients["round"] == 1)]
    assert losses[0] == pytest.approx(np.average(own["loss"], weights=own["num_samples"]))
