"""Fills the tables of docs/metrics.md from the lists of metrics that the server has.

    python -m tools.metrics_page            # writes
    python -m tools.metrics_page --check    # exits with 1 if the page is out of date

A table stands between two comments, `<!--table: NAME-->` and `<!--/-->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.pages import markdown_table, refresh

from everystop.observe.catalogue import COUNTERS, GAUGES, HISTOGRAMS, TENANTS
from everystop.observe.families import Family, Kind
from everystop.observe.ledger import LEDGER_FAMILIES
from everystop.observe.vllm_names import ALIASES, FAMILIES_OF_VLLM, PREFIX
from everystop.server.delivery import DELIVERY_FAMILIES
from everystop.server.edge_metrics import STATE_FAMILIES
from everystop.server.http_counts import HTTP_FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
TABLE = re.compile(r"(<!--table: (\w+)-->\n).*?(<!--/-->)", re.DOTALL)


def own(families: Iterable[Family[Any]]) -> str:
    """Name, kind, labels, meaning and origin of each."""
    return markdown_table(
        ("name", "kind", "labels", "what it is", "from"),
        (
            (f"`{f.name}`", f.kind, ", ".join(f"`{label}`" for label in f.labels) or "–", f.text, f.source)
            for f in families
        ),
    )


def vllm() -> str:
    """Each of vLLM's names and which of ours it is."""
    rows = [
        (f"`{PREFIX}{name}`", f"`everystop_{ours}`", "vLLM's" if bounds else "ours") for name, ours, bounds in ALIASES
    ]
    rows += [(f"`{f.name}`", f.text, "–") for f in FAMILIES_OF_VLLM[len(ALIASES) :]]
    return markdown_table(("name", "is", "buckets"), rows)


def _of_state(kind: Kind) -> list[Family[Any]]:
    return [family for family in STATE_FAMILIES if family.kind is kind]


TABLES: dict[str, Callable[[], str]] = {
    "gauges": lambda: own([*GAUGES, *_of_state(Kind.GAUGE)]),
    "counters": lambda: own([*COUNTERS, *_of_state(Kind.COUNTER)]),
    "histograms": lambda: own(HISTOGRAMS),
    "tenants": lambda: own(TENANTS),
    "ledger": lambda: own([*LEDGER_FAMILIES, *DELIVERY_FAMILIES]),
    "http": lambda: own(HTTP_FAMILIES),
    "vllm": vllm,
}


def filled(page: str) -> str:
    """The page with all its tables as they are now; raises KeyError for a table that nobody makes."""
    return TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], page)


if __name__ == "__main__":
    sys.exit(refresh([PAGE], filled))
