"""What a test may measure on a machine that others use, too: memory, and the least of several durations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def least(measure: Callable[[], float], *, enough: float, tries: int) -> float:
    """The least of so many measurements, or the first that is below `enough`.

    What is slow, or keeps something, is and does so each time; a machine that is busy, or an allocator that takes
    memory in large pieces, does it now and then.
    """
    found = [measure()]
    while min(found) >= enough and len(found) < tries:
        found.append(measure())
    return min(found)
