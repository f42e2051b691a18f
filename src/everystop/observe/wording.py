"""How explanations write durations, counts and other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everystop.core.durations import NS_PER_MS, NS_PER_S, NS_PER_US

NameOf = Callable[[int], str | None]
"""The name of a request, or None for one that the reader may not see."""

ANOTHER = "another request"
SIBLING = "its sibling"


def number_name(request_id: int) -> str:
    """What a request is called by its number in the engine."""
    return f"r{request_id}"


def duration(ns: int) -> str:
    """In the unit that suits it, with two or three digits: 850 µs, 3.2 ms, 340 ms, 12.4 s, 2 min 5 s.

    What would round up into the next unit is written in it.
    """
    if ns < 0.9995 * NS_PER_MS:
        return f"{ns / NS_PER_US:.0f} µs"
    if ns < 9.95 * NS_PER_MS:
        return f"{ns / NS_PER_MS:.1f} ms"
    if ns < 999.5 * NS_PER_MS:
        return f"{ns / NS_PER_MS:.0f} ms"
    if ns < 119.95 * NS_PER_S:
        return f"{ns / NS_PER_S:.1f} s"
    minutes, seconds = divmod(round(ns / NS_PER_S), 60)
    return f"{minutes} min {seconds} s"


def counted(num: int, noun: str) -> str:
    """A number and its noun: 1 token, 2,000 tokens."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def who(request_id: int, name_of: NameOf) -> str:
    """A request by the name that the reader may know it by."""
    return name_of(request_id) or ANOTHER


def whose(request_id: int, name_of: NameOf) -> str:
    """The same in the genitive."""
    return f"{who(request_id, name_of)}'s"


def times(num: int) -> str:
    """Once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(num, f"{num:,} times")


def listed(parts: Sequence[str]) -> str:
    """A; A and B; A, B and C."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
