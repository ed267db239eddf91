"""Ranges of numbers that settings take. Whoever declares a setting uses these; pydantic checks them."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

LARGEST_COUNT = 10**9
"""Larger counts are slips of the keyboard, and overflow what counts them."""
Positive = Annotated[int, Ge(1), Le(LARGEST_COUNT)]
NotNegative = Annotated[int, Ge(0), Le(LARGEST_COUNT)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Rate = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Le(1)]
