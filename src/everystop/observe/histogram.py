"""Histograms of whole numbers, and the bounds of their buckets; knows nothing of what is measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

NEAR = 0.1  # a bound that lies closer to another one, in proportion, is left out


class Histogram:
    """Counts of values by bucket; `bounds` are inclusive upper ends, a last bucket without end follows.

    Values are `scale` times the unit of the bounds: with bounds in seconds and a scale of 10⁹ they are nanoseconds. As
    whole numbers they sum up exactly, in whatever order they come.
    """

    __slots__ = ("_ends", "_scale", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], scale: int = 1) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0
        self._scale = scale
        self._ends = [bound if scale == 1 else round(bound * scale) for bound in self.bounds]

    def add(self, value: int, num: int = 1) -> None:
        """Count a value, `num` times."""
        self.counts[bisect_left(self._ends, value)] += num
        self.sum += value * num

    @property
    def total(self) -> float:
        """The sum of all values, in the unit of the bounds."""
        return self.sum / self._scale

    @property
    def num(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def cumulative(self, bounds: Sequence[float] | None = None) -> list[tuple[str, float]]:
        """(upper end, values up to it), as Prometheus wants them; with `bounds`, at some of the own bounds only.

        Raises KeyError for a bound that is none of the own ones.
        """
        rows, count = [], 0
        for bound, num in zip(self.bounds, self.counts, strict=False):
            count += num
            rows.append((bound, float(count)))
        if bounds is not None:
            counts = dict(rows)
            rows = [(bound, counts[bound]) for bound in bounds]
        return [*((str(bound), count) for bound, count in rows), ("+Inf", float(self.num))]


def geometric(first: float, last: float, *, ratio: float = 2**0.5) -> list[float]:
    """Bounds from `first` up to `last`, each about `ratio` times the one before, in two digits."""
    bounds, bound = [], first
    while bound <= last:
        bounds.append(float(f"{bound:.2g}"))
        bound *= ratio
    return bounds


def merged(required: Iterable[float], wished: Iterable[float]) -> tuple[float, ...]:
    """All bounds that are required, and those of the others that are not next to one of them."""
    kept = sorted(required)
    extra = [bound for bound in wished if all(abs(bound / other - 1) > NEAR for other in kept)]
    return tuple(sorted([*kept, *extra]))


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `most`."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return tuple(bounds)
            bounds.append(float(digit * power))
        power *= 10
