"""How sizes, times and shares of a GPU are read and written: with a unit, and one that suits."""

import math
import re

from qdsim.errors import BadInput

WHOLE_GPU = 1 - 1e-4
MINUTE_S, HOUR_S = 60.0, 3600.0


def read_size(option: str, text: str) -> float:
    """Read a size such as 24GB, in bytes; a number without a unit is refused."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]i?)B?|B)", text.strip(), re.IGNORECASE)
    if found is None:
        bare = re.fullmatch(r"\d+(?:\.\d+)?", text.strip())
        raise BadInput(option, text, f"has no unit: write {text.strip()}GB" if bare else "write a size such as 24GB")
    if float(found[1]) <= 0:
        raise BadInput(option, text, "write a size such as 24GB or 500MB, above 0")
    unit = (found[2] or "").upper()
    base = 1024.0 if unit.endswith("I") else 1000.0
    return float(found[1]) * float(base ** " KMGT".index(unit[:1] or " "))


def size(count: float) -> str:
    """Return a number of bytes in the unit that leaves one to three digits before the point."""
    power = max(0, int(math.log10(count) // 3)) if count >= 1 else 0
    power = min(4, power + (round(count / 1000**power) >= 1000))  # 999.7 MB are 1 GB
    return f"{_short(count / 1000**power)} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def gpu_share(fraction: float) -> str:
    """Return a fraction of a GPU as people say it: ``1/7 of a GPU``."""
    if fraction >= WHOLE_GPU:
        return f"{fraction:g} GPU"
    parts = round(1 / fraction)
    return f"1/{parts} of a GPU" if abs(fraction * parts - 1) < 1e-3 else f"{fraction:g} GPU"


def time(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, whichever suits."""
    unit_s, name = _unit(seconds)
    return f"{_short(seconds / unit_s)} {name}"


def time_range(low_s: float, high_s: float) -> str:
    """Return a range of durations; the shorter one has the unit of the longer where that leaves a digit."""
    unit_s, _ = _unit(high_s)
    low, high = time(low_s), time(high_s)
    if low_s >= 0.5 * unit_s or _unit(low_s)[0] == unit_s:
        low = _short(low_s / unit_s)
    return high if low == high.partition(" ")[0] else f"{low} to {high}"


def hours(seconds: float) -> str:
    """Return a number of hours, as GPU-hours are counted, never as 0.00."""
    return _short(seconds / HOUR_S) if seconds >= 0.01 * HOUR_S else "under 0.01"


def _unit(seconds: float) -> tuple[float, str]:
    if seconds < 100:
        return 1.0, "s"
    return (MINUTE_S, "min") if seconds < 100 * MINUTE_S else (HOUR_S, "h")


def _short(number: float) -> str:
    """Return a number with two digits, and no more of its fraction than matters."""
    if number >= 9.95:
        return f"{number:,.0f}"
    return f"{number:.1f}".removesuffix(".0") if number >= 0.95 else f"{number:.2g}"
