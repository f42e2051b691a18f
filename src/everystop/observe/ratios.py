"""Paired ratios with their intervals: how many times better one policy is than another, repeat by repeat.

Each repeat runs both policies one after the other, so what is wrong with the machine in that minute meets both. The
ratio of a repeat is taken first; its logarithm is averaged over the repeats, and the interval is Student's: with n
repeats, mean ± t(n − 1) · s / √n on the logarithms, brought back by exp. It holds where the logarithms of
repeats are independent and roughly normal; one repeat has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

METHOD = "paired over repeats: Student's 95 % interval of the mean logarithm of the ratio"
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The geometric mean of `values`, one a repeat, and its interval from `low` to `high`, None without one."""

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None

    @property
    def is_above_one(self) -> bool:
        """The whole interval is above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_below_one(self) -> bool:
        """The whole interval is below 1."""
        return self.high is not None and self.high < 1

    @property
    def is_decided(self) -> bool:
        """The interval does not hold 1."""
        return self.is_above_one or self.is_below_one


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio | None:
    """The ratio of two figures over repeats, pair by pair; None without a pair, or where a figure is not above 0."""
    pairs = list(zip(numerators, denominators, strict=True))
    if not pairs or not all(a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return None
    return mean_ratio([a / b for a, b in pairs])


def mean_ratio(values: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """The geometric mean of ratios above 0, and the interval that holds the true one with that confidence."""
    logs = [math.log(value) for value in values]
    n, mean = len(logs), math.fsum(logs) / len(logs)
    if n == 1:
        return Ratio(values=tuple(values), mean=math.exp(mean), low=None, high=None)
    deviation = math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (n - 1))
    margin = t_quantile(n - 1, confidence) * deviation / math.sqrt(n)
    return Ratio(values=tuple(values), mean=math.exp(mean), low=math.exp(mean - margin), high=math.exp(mean + margin))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """What Student's |t| with so many degrees of freedom stays below with that probability.

    Example, 4 degrees and 95 %: 2.776.
    """
    assert degrees >= 1
    low, high = 0.0, 1.0
    while _t_within(high, degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_within(t: float, degrees: int) -> float:
    """Probability that |T| ≤ t: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    total, term = 0.0, cosine if is_odd else 1.0
    for k in range(degrees // 2):
        total += term
        first = 2 * k + (2 if is_odd else 1)
        term *= first / (first + 1) * cosine * cosine
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
