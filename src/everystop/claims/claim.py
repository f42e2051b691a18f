"""What a claim is: words, a way to measure it, and a picture of what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everystop.claims.findings import Findings
from everystop.claims.lab import Lab
from everystop.observe.report.grammar import Theme
from everystop.observe.report.sheets import Sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`statement` is what is claimed, in plain words; `test` what must come out for it to hold.

    `draw(data, theme)` lays out the picture of `Findings.data` on a new sheet, with nothing else to go by.
    """

    number: int
    name: str
    title: str
    statement: str
    test: str
    measure: Callable[[Lab], Findings]
    draw: Callable[[Mapping[str, Any], Theme], Sheet]
