"""Numbers as text."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits and no exponent. Example: 0.012345 gives 0.0123, 12345 gives 12,345."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def in_time(seconds: float) -> str:
    """A duration in the unit that suits it. Example: 0.0123 gives 12.3 ms."""
    if not math.isfinite(seconds):
        return "–"
    if abs(seconds) >= 1 or seconds == 0:
        return f"{significant(seconds)} s"
    if abs(seconds) >= 1e-3:
        return f"{significant(seconds * 1e3)} ms"
    return f"{significant(seconds * 1e6)} µs"


def percent(share: float) -> str:
    """A share as a percentage; what is not nothing never reads as 0."""
    if 0 < share < 0.005:
        return "<1 %"
    return f"{share * 100:.0f} %"


def listed(words: list[str]) -> str:
    """Words in a row: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
