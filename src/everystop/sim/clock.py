"""Virtual time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """The time of one replica in integer nanoseconds; it moves only when told."""

    now_ns: int = 0

    def advance(self, ns: int) -> None:
        """Let time pass."""
        self.now_ns += ns

    def advance_to(self, now_ns: int) -> None:
        """Let time pass up to then, if it has not yet."""
        self.now_ns = max(self.now_ns, now_ns)
