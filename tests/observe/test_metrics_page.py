"""The page about metrics lists those that there are."""

from __future__ import annotations

from tools import metrics_page

from everystop.observe.catalogue import FAMILIES
from everystop.observe.families import Kind
from everystop.observe.ledger import LEDGER_FAMILIES
from everystop.observe.vllm_names import FAMILIES_OF_VLLM
from everystop.server.delivery import DELIVERY_FAMILIES
from everystop.server.edge_metrics import STATE_FAMILIES
from everystop.server.http_counts import HTTP_FAMILIES

ALL = [*FAMILIES, *FAMILIES_OF_VLLM, *STATE_FAMILIES, *HTTP_FAMILIES, *LEDGER_FAMILIES, *DELIVERY_FAMILIES]


def test_the_page_is_the_one_that_the_tool_writes() -> None:
    text = metrics_page.PAGE.read_text(encoding="utf-8")
    assert metrics_page.filled(text) == text, "run python -m tools.metrics_page"


def test_every_metric_is_on_the_page_once() -> None:
    text = metrics_page.PAGE.read_text(encoding="utf-8")
    for family in ALL:
        assert text.count(f"\n| `{family.name}` |") == 1, family.name


def test_names_are_told_apart_and_say_what_they_are() -> None:
    assert len({family.name for family in ALL}) == len(ALL)
    for family in ALL:
        assert family.text
        assert (family.kind is Kind.COUNTER) == (family.name.endswith("_total") and family.kind is not Kind.HISTOGRAM)
