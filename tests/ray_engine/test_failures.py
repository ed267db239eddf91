"""The policy for failed calls, without a cluster."""

import pytest

from qdsim.ray_engine.failures import Decision, decide


@pytest.mark.parametrize("attempts", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["raised", "out_of_memory"])
def test_a_call_that_raised_would_raise_again(kind, attempts):
    """It is given up at once, however many attempts are allowed; more memory is nowhere either."""
    assert decide(kind, attempts, 3) is Decision.GIVE_UP


@pytest.mark.parametrize("kind", ["actor_lost", "gpu_failed", "timed_out", "update_lost"])
def test_a_lost_actor_is_replaced_as_often_as_a_step_may_be_tried(kind):
    """Three attempts: lost once and twice it is replaced, lost a third time given up."""
    assert [decide(kind, n, 3) for n in (1, 2, 3)] == [Decision.REPLACE, Decision.REPLACE, Decision.GIVE_UP]
    assert decide(kind, 1, 1) is Decision.GIVE_UP


@pytest.mark.parametrize("attempts", [0, 1, 9])
def test_a_call_whose_actor_was_replaced_meanwhile_is_not_to_blame(attempts):
    """It is made again, and no attempt is counted against it."""
    assert decide("actor_replaced", attempts, 3) is Decision.RETRY
