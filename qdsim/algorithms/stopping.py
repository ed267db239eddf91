"""When a phase has converged. The paper stops "at convergence" without saying what that is; this is our rule.

Forgetting has converged once F-Set accuracy is at most 1 % (class level; at client level no such number is known
without retraining, so the rounds are fixed). Descent has converged once the best accuracy of the last rounds, two in
recovery and relearning and five in training, retraining and S2U, is less than half a point above the best before them.

These rules look at test data, which a federation may not have. ``recover.stop = "loss"`` does not: a client's first
mini-batch is seen by the model of the round before it moves, so the mean of these losses says what the last round was
worth, and costs nothing. Recovery has settled once it has fallen by less than 5 % from one round to the next; the round
that shows it is one more than was needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FORGOTTEN = 0.01
GAIN = 0.005


@dataclass(frozen=True)
class Rule:
    """One rule on one accuracy. Its text is what the table ``stages`` says."""

    score: str
    """Column of the table ``rounds`` that it is about."""
    patience: int = 0
    """0: stop once the score is at most 1 %; else once this many rounds have gained less than half a point."""
    falls: float = 0.0
    """If not 0, the score is a loss: stop once it has fallen by less than this share in a round."""

    def __str__(self) -> str:
        """Say the rule in one line."""
        if self.falls:
            return f"{self.score} falls by < {self.falls:.0%}"
        if not self.patience:
            return f"{self.score} <= {FORGOTTEN}"
        return f"{self.score} gains < {GAIN} in {self.patience} rounds"

    def reached(self, scores: Sequence[float | None]) -> bool:
        """Tell whether the phase is over; ``scores`` begin with the one before the phase (None if unknown)."""
        known = [score for score in scores if score is not None]
        if self.falls:
            return len(known) > 1 and known[-1] > (1 - self.falls) * known[-2]
        if not self.patience:
            return bool(known) and len(scores) > 1 and known[-1] <= FORGOTTEN
        if len(known) <= self.patience:
            return False
        return max(known[-self.patience :]) < max(known[: -self.patience]) + GAIN


TRAINED = Rule("test_accuracy", patience=5)
RETRAINED = Rule("retain_accuracy", patience=5)
FORGOT = Rule("forget_accuracy")
RECOVERED = Rule("retain_accuracy", patience=2)
SETTLED = Rule("start_loss", falls=0.05)
RELEARNED = Rule("forget_accuracy", patience=2)
