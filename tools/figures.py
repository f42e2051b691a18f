"""Fills the figures into the pages that quote measurements, from what `everystop claims` has found.

    python -m tools.figures            # writes
    python -m tools.figures --check    # says which pages are out of date, and exits with 1

A page quotes a figure between two comments, which nobody sees who reads it:

    <!--claim 1: steps of a single row-->980 steps<!--/-->

What stands between them is the text of that figure in docs/claims.json; `headline` and `verdict` stand for the claim's
own. `interval` before a name gives the interval instead of the figure.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tools.pages import refresh

from everystop.claims.findings import Findings
from everystop.claims.results import read_results

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUOTE = re.compile(r"(<!--claim (\d+): (interval )?(.+?)-->)(.*?)(<!--/-->)", re.DOTALL)


def text_of(findings: Findings, name: str, *, is_interval: bool) -> str:
    """A figure's text, or its interval's; raises KeyError for a figure that the claim has not."""
    if name == "headline":
        return findings.headline
    if name == "verdict":
        return findings.verdict.value
    figures = {figure.name: figure for figure in findings.figures}
    figures |= {condition.figure.name: condition.figure for condition in findings.conditions}
    return figures[name].range_text() if is_interval else figures[name].text()


def filled(page: str, text_of_claim: Callable[[int, str, bool], str]) -> str:
    """The page with all its quotes as they are now."""

    def fill(quote: re.Match[str]) -> str:
        begin, number, interval, name, _, end = quote.groups()
        return begin + text_of_claim(int(number), name, interval is not None) + end

    return QUOTE.sub(fill, page)


def with_claims(page: str) -> str:
    """The page with the figures of docs/claims.json; raises KeyError for a claim or figure that is not there."""
    results = read_results(DOCS)
    return filled(
        page,
        lambda number, name, is_interval: text_of(results[number].findings, name, is_interval=is_interval),
    )


if __name__ == "__main__":
    sys.exit(refresh(sorted(DOCS.glob("*.md")), with_claims))
