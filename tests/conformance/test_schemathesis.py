"""Requests made from the server's own description: nothing fails inside, nothing hangs, nothing undescribed comes."""

from __future__ import annotations

import pytest
from tests.conformance.fuzz import run

from everystop.server.operations import OPERATIONS

DOCUMENTED_BUSY = {429, 503}


def test_some_hundred_generated_requests_meet_the_description() -> None:
    tally = run(max_examples=16)
    assert tally.cases.total() >= 200
    described = {f"{method} {path}" for method, path in OPERATIONS if not path.startswith("/ui")}
    assert set(tally.cases) == described - {"GET /openapi.json"}, "which is asked for what it describes"
    assert 500 not in tally.statuses
    assert {200, 400, 422} <= set(tally.statuses)


@pytest.mark.slow
def test_thousands_of_generated_requests_meet_the_description() -> None:
    tally = run(max_examples=150)
    assert tally.cases.total() >= 2_000
    assert not DOCUMENTED_BUSY & set(tally.statuses), "one client at a time neither fills a queue nor meets a drain"
