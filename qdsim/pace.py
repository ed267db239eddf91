"""How long the rest takes, from the rate of the last rounds."""

import time


class Pace:
    """Marks of how much is done when."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def mark(self, share_done: float) -> None:
        """Take note of how much is done by now."""
        if not self._marks or share_done > self._marks[-1][1]:
            self._marks = [*self._marks[-20:], (time.monotonic(), share_done)]

    def forget(self) -> None:
        """Begin anew: what was passed over tells nothing of the speed."""
        self._marks = []

    def left_s(self) -> float | None:
        """Guess the time left; None where nothing is known yet."""
        if len(self._marks) < 2:
            return None
        (then_s, then), (last_s, last) = self._marks[0], self._marks[-1]
        return (1 - last) * (last_s - then_s) / (last - then) if last > then else None
