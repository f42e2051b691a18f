"""Jain's fairness index of a run, window by window; owns no request and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WINDOW_NS = 10 * 10**9


def jain(shares: Iterable[float]) -> float:
    """(Σx)² / (n · Σx²): 1 if all are equal, 1/n if one has everything (Jain, Chiu and Hawe, 1984); 1 for nothing."""
    total = squares = 0.0
    num = 0
    for share in shares:
        total += share
        squares += share * share
        num += 1
    return total * total / (num * squares) if squares else 1.0


class FairnessIndex:
    """The mean over windows of 10 s of Jain's index over what tenants were served in each, over their weights.

    Only a tenant with requests waiting both at the start and at the end of a window counts in it: another may have been
    served little because it asked for little. A window with fewer than two such tenants does not count. At a border the
    steps under way count as done.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._total = 0.0
        self._least = 1.0
        self._num_windows = 0
        self._before: dict[str, int] = {}

    def border(self, waiting: Iterable[str], service: Mapping[str, int]) -> None:
        """A window ends and the next one begins: who waits now, and what each tenant has been served so far."""
        now = {tenant: service.get(tenant, 0) for tenant in sorted(set(waiting))}
        gained = [(now[name] - self._before[name]) / self._weight(name) for name in now if name in self._before]
        self._before = now
        if len(gained) < 2:
            return
        index = jain(gained)
        self._total += index
        self._least = min(self._least, index)
        self._num_windows += 1

    def pause(self) -> None:
        """Nobody is there; the next border opens a window and closes none."""
        self._before = {}

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def figures(self) -> dict[str, Any] | None:
        """Mean and least index, and over how many windows; None if no window counted."""
        if not self._num_windows:
            return None
        return {
            "mean": round(self._total / self._num_windows, 6),
            "least": round(self._least, 6),
            "num_windows": self._num_windows,
            "window_s": WINDOW_NS / 10**9,
        }
