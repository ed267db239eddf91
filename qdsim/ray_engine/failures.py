"""What to do when a call of a client actor fails: a pure policy, tested without a cluster."""

from enum import Enum
from typing import Literal

FailureKind = Literal[
    "raised", "gpu_failed", "out_of_memory", "actor_lost", "timed_out", "update_lost", "actor_replaced"
]
"""``raised``: the call itself raised. ``gpu_failed``: its GPU, or one of CUDA's libraries, reported an error, after
which the process cannot use the GPU any more. ``out_of_memory``: it asked for more memory than there is.
``actor_lost``: its process or node is gone. ``timed_out``: it has not returned in time. ``update_lost``: the step is
done, and its update was lost with the node that held it. ``actor_replaced``: another call has found the actor lost, and
it was replaced while this one was under way."""


class Decision(Enum):
    """What becomes of a failed call."""

    RETRY = "retry"
    """Make it again, on the actor that is there now."""
    REPLACE = "replace"
    """Start the actor again, with its clients' states, and make the call again."""
    GIVE_UP = "give up"
    """End the run: leaving a client out would change the result."""


def decide(kind: FailureKind, attempts: int, max_attempts: int) -> Decision:
    """Decide on a failed call; ``attempts`` counts how often it was made and lost, this time included.

    A call that raised would raise again, as would one that ran out of memory. One whose actor was replaced meanwhile is
    not to blame for it.
    """
    if kind in ("raised", "out_of_memory"):
        return Decision.GIVE_UP
    if kind == "actor_replaced":
        return Decision.RETRY
    return Decision.GIVE_UP if attempts >= max_attempts else Decision.REPLACE
