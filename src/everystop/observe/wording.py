"""How explanations and reports write counts, errors and other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NameOf = Callable[[int], str | None]
"""The name of a request, or None for one that the reader may not see."""

MAX_MESSAGES = 3
ANOTHER = "another request"
SIBLING = "its sibling"


def number_name(request_id: int) -> str:
    """What a request is called by its number in the engine."""
    return f"r{request_id}"


def counted(num: int, noun: str) -> str:
    """A number and its noun: 1 token, 2,000 tokens."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def failures(errors: Sequence[tuple[str, int]]) -> str:
    """The most frequent messages, each with how often it came, and how many other ones there are."""
    said = [f"{message} ({times(num)})" for message, num in errors[:MAX_MESSAGES]]
    if len(errors) > MAX_MESSAGES:
        said.append(f"and {counted(len(errors) - MAX_MESSAGES, 'other message')}")
    return "; ".join(said)


def who(request_id: int, name_of: NameOf) -> str:
    """A request by the name that the reader may know it by."""
    return name_of(request_id) or ANOTHER


def whose(request_id: int, name_of: NameOf) -> str:
    """The same in the genitive."""
    return f"{who(request_id, name_of)}'s"


def times(num: int) -> str:
    """Once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(num, f"{num:,} times")
