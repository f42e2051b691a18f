"""How many connections there may be, and who goes where there would be too many; knows neither HTTP nor TLS."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

MAX_REFUSED = 32  # connections beyond all that may be, which are still told why, or what they have not taken yet


class Idler(Protocol):
    """A connection, as far as it may have to go."""

    def leave(self, *, at_once: bool) -> None:
        """End it, `at_once` with all that its client has not taken."""


class ConnectionRoom:
    """Counts connections, `max_num` at most and `max_refused` more that are on their way out, and knows which of them
    have no request, whoever has had none for longest first. A connection counts from the moment in which it has been
    taken, whatever it must do before it can ask. Asyncio thread only.
    """

    def __init__(self, max_num: int) -> None:
        self.max_num = max_num
        self.max_refused = MAX_REFUSED
        self.num = 0
        self._idle: OrderedDict[Idler, None] = OrderedDict()

    @property
    def has_time(self) -> bool:
        """Few enough are on their way out that one of them may be told why."""
        return self.num <= self.max_num + self.max_refused

    def enter(self, newcomer: Idler) -> bool:
        """Count one more, and return whether it may stay.

        Where there is one too many, whoever has had no request for longest goes, which may be the newcomer itself. What
        the one that goes has not taken of its last answer is still sent, unless too many are on their way out.
        """
        self.num += 1
        return self.settle(newcomer)

    def settle(self, newcomer: Idler) -> bool:
        """As `enter`, for one that counts already."""
        self._idle[newcomer] = None
        if self.num <= self.max_num:
            return True
        longest, _ = self._idle.popitem(last=False)
        if longest is not newcomer:
            longest.leave(at_once=not self.has_time)
        return longest is not newcomer

    def rest(self, one: Idler) -> None:
        """It has no request any more."""
        self._idle[one] = None

    def work(self, one: Idler) -> None:
        """It has a request, and is not asked to go; nor is one that will never have any here."""
        self._idle.pop(one, None)

    def exit(self, one: Idler) -> None:
        """It has ended."""
        self._idle.pop(one, None)
        self.num -= 1
