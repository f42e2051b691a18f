"""Numbers, durations and lists as text, for whoever prints, draws or explains; knows nothing of them but units."""

from __future__ import annotations

import math
from collections.abc import Sequence

from everystop.core.durations import NS_PER_MS, NS_PER_S, NS_PER_US


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits and no exponent.

    Example: 0.012345 gives 0.0123, 12345 gives 12,345, and 9.999 gives 10.0.
    """
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if round(abs(value), decimals) >= 10 ** (digits - decimals):  # it has one more before the point when rounded
        decimals -= 1
    return f"{value:,.{max(0, decimals)}f}"


def in_time(seconds: float, *, is_said: bool = False) -> str:
    """A figure: a duration to three digits, so that two can be compared, in the unit that suits it. One that `is_said`,
    such as a target or a tick of an axis, has no zeros that nobody said. Example: 0.0123 gives 12.3 ms, and 0.05 gives
    50.0 ms, or 50 ms.

    In prose, where two digits will do, `duration` reads better.
    """
    if not math.isfinite(seconds):
        return "–"
    size = abs(seconds)
    factor, unit = (1e3, "ms") if size >= 0.9995e-3 else (1e6, "µs")
    if size >= 0.9995 or seconds == 0:
        factor, unit = 1, "s"
    number = significant(seconds * factor)
    if is_said and "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit}"


def duration(ns: int) -> str:
    """A duration in prose, such as that of an explanation: in the unit that suits it, minutes too, with two or three
    digits: 850 µs, 3.2 ms, 340 ms, 12.4 s, 2 min 5 s. What would round up into the next unit is written in it.

    Where figures stand beside each other, `in_time` gives all of them three digits.
    """
    if ns < 0.9995 * NS_PER_MS:
        return f"{ns / NS_PER_US:.0f} µs"
    if ns < 9.95 * NS_PER_MS:
        return f"{ns / NS_PER_MS:.1f} ms"
    if ns < 999.5 * NS_PER_MS:
        return f"{ns / NS_PER_MS:.0f} ms"
    if ns < 119.95 * NS_PER_S:
        return f"{ns / NS_PER_S:.1f} s"
    minutes, seconds = divmod(round(ns / NS_PER_S), 60)
    return f"{minutes} min {seconds} s"


def percent(share: float) -> str:
    """A share as a percentage; what is not nothing never reads as 0."""
    if 0 < share < 0.005:
        return "<1 %"
    return f"{share * 100:.0f} %"


def listed(parts: Sequence[str]) -> str:
    """Parts in a row: a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
