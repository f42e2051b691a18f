"""A limit on service over time: a token bucket that holds one second's worth, in whole numbers."""

from __future__ import annotations

from everystop.core.durations import NS_PER_S

BURST_NS = NS_PER_S
_ONE = 1 << 20  # parts of a nanosecond, so that rounding a price costs a rate at most a millionth


class RateLimit:
    """A token bucket of `per_s` weighted tokens a second, kept as the time until which what was spent is paid for.

    Spending is never refused: it moves that time on, and whoever asks before it has yet to pay. At most `BURST_NS` of
    idleness is saved up.

    Example, 100 a second: after a long idleness 100 may be spent and are paid for at once; 50 more are 0.5 s later.
    """

    __slots__ = ("_paid", "_price")

    def __init__(self, per_s: float) -> None:
        self._price = round(NS_PER_S * _ONE / per_s)
        self._paid = -BURST_NS * _ONE

    @property
    def paid_ns(self) -> int:
        """When all that was spent will be paid for."""
        return -(-self._paid // _ONE)

    def spend(self, cost: int, now_ns: int) -> None:
        """Count weighted tokens at that time; a negative cost gives some back."""
        self._paid = max(self._paid, (now_ns - BURST_NS) * _ONE) + cost * self._price
