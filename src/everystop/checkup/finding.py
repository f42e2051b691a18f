"""What a check of `everystop doctor` comes back with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How well something is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw; `advice` says what to do where it is not well."""

    name: str
    status: Status
    text: str
    advice: str = ""


class NotLookedAt(Exception):
    """What a check looks at depends on something else, of which another finding tells."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice
