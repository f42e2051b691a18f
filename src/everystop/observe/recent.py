"""Counts and quantiles of the last minute, in memory that does not grow with the traffic."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from everystop.core.durations import NS_PER_S

WINDOW_S = 60
PRECISION_BITS = 7  # a bin is at most 1/64 as wide as its values are large, so its middle is off by 1 % at most


def bin_of(value: int) -> int:
    """The number of the bin that holds a value of 0 or more; higher values never have lower numbers.

    Values below 128 have bins of their own; 1000 = 0b1111101000 shares bin 3·128 + 125 with 1001 to 1007.
    """
    shift = max(0, value.bit_length() - PRECISION_BITS)
    return (shift << PRECISION_BITS) | (value >> shift)


def middle_of(number: int) -> int:
    """The value in the middle of a bin."""
    shift = number >> PRECISION_BITS
    return ((number & ((1 << PRECISION_BITS) - 1)) << shift) + ((1 << shift) >> 1)


class RecentValues:
    """How often which value was seen in each of the last 60 seconds. Times must not fall by more than a second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque()
        self._total: Counter[int] = Counter()

    def add(self, now_ns: int, values: Mapping[int, int]) -> None:
        """Count values, each as often as the mapping says."""
        second = now_ns // NS_PER_S
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
        counts = self._seconds[-1][1]
        for value, num in values.items():
            number = bin_of(max(0, value))
            counts[number] += num
            self._total[number] += num

    def quantiles(self, now_ns: int, shares: Sequence[float]) -> list[int | None]:
        """For each share, in rising order, the value that so many are not above, within 1 %; None without values."""
        self._forget(now_ns // NS_PER_S - WINDOW_S)
        num = sum(self._total.values())
        if num == 0:
            return [None] * len(shares)
        found: list[int | None] = []
        num_below, bins = 0, iter(sorted(self._total))
        number = next(bins)
        for share in shares:
            while num_below + self._total[number] < share * num:
                num_below += self._total[number]
                number = next(bins)
            found.append(middle_of(number))
        return found

    def _forget(self, last_second: int) -> None:
        while self._seconds and self._seconds[0][0] <= last_second:
            self._total.subtract(self._seconds.popleft()[1])
            self._total = +self._total


class RecentSum:
    """The sum of what was counted in each of the last 60 seconds."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        self._total = 0

    def add(self, now_ns: int, num: int) -> None:
        """Count so many."""
        second = now_ns // NS_PER_S
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append([second, 0])
        self._seconds[-1][1] += num
        self._total += num

    def total(self, now_ns: int) -> int:
        """The sum."""
        while self._seconds and self._seconds[0][0] <= now_ns // NS_PER_S - WINDOW_S:
            self._total -= self._seconds.popleft()[1]
        return self._total
