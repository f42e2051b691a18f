"""How long steps usually take, and so which of them are slow, told while they come."""

from __future__ import annotations

from collections import deque
from statistics import median

SLOW_FACTOR = 2.0
REMEMBERED = 256
LEAST = 16  # steps of a size before it has a median
LEARN_EVERY = 32


def size_of(num_rows: int) -> int:
    """Steps with about as many rows are of one size: 1 for one row, 2 for two and three, 3 for four to seven."""
    return num_rows.bit_length()


class StepPace:
    """Learns from the last 256 steps of each size that only decoded; `is_slow` asks beside what came before."""

    def __init__(self) -> None:
        self._durations: dict[int, deque[int]] = {}
        self._num_seen: dict[int, int] = {}
        self._medians: dict[int, float] = {}

    def add_decode(self, num_rows: int, took_ns: int) -> None:
        """A step that only decoded is over."""
        size = size_of(num_rows)
        durations = self._durations.setdefault(size, deque(maxlen=REMEMBERED))
        durations.append(took_ns)
        num_seen = self._num_seen[size] = self._num_seen.get(size, 0) + 1
        if num_seen == LEAST or num_seen % LEARN_EVERY == 0:
            self._medians[size] = median(durations)

    def is_slow(self, num_rows: int, took_ns: int) -> bool:
        """It took more than twice the median of decode steps of its size; where there were too few of those, of the
        other sizes' medians.
        """
        usual_ns = self._medians.get(size_of(num_rows))
        if usual_ns is None and self._medians:
            usual_ns = median(self._medians.values())
        return usual_ns is not None and took_ns > SLOW_FACTOR * usual_ns
