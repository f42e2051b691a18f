"""Stand-in until waiting is explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from everystop.observe.history import History


@dataclass(frozen=True, slots=True)
class WaitingState:
    """Where a request stands in the queue."""

    position: int
    num_waiting: int
    reason: str
    sentence: str
    estimated_ns: int | None

    def as_data(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)


def waiting_state(
    history: History, request_id: int, now_ns: int, *, name_of: Callable[[int], str | None]
) -> WaitingState | None:
    """Stand-in."""
    waiting = [trail.request_id for trail in history.trails.values() if trail.is_waiting]
    if request_id not in waiting:
        return None
    return WaitingState(waiting.index(request_id) + 1, len(waiting), "no_slot", "it waits", 2_100_000_000)
