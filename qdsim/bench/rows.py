"""What a benchmark returns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One number that was measured."""

    benchmark: str
    case: str
    """What was varied: ``W=32``, ``100 clients``."""
    side: str
    """Who: ``qdsim``, ``qdsim compiled``, ``bare PyTorch``, ``Flower``."""
    quantity: str
    value: float
    unit: str


@dataclass(frozen=True)
class Ratio:
    """What a benchmark is for: two numbers of the same run against each other."""

    benchmark: str
    case: str
    text: str
    """In words: ``throughput against bare PyTorch``."""
    value: float
    aim: float | None = None
    """None: shown, without an aim."""
    at_least: bool = True
    unit: str = "times"

    @property
    def met(self) -> bool | None:
        """Tell whether the aim was reached."""
        if self.aim is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim


@dataclass(frozen=True)
class Found:
    """A benchmark's numbers."""

    measured: list[Measured]
    ratios: list[Ratio]
