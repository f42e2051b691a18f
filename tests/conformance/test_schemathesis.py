"""Requests made from the server's own description: nothing fails inside, nothing hangs, nothing undescribed comes."""

from __future__ import annotations

from tests.conformance.fuzz import run

from everystop.server.operations import OPERATIONS

BUSY = {429, 503}


def test_thousands_of_generated_requests_meet_the_description() -> None:
    tally = run(max_examples=150)
    assert tally.cases.total() >= 2_000
    described = {f"{method} {path}" for method, path in OPERATIONS if not path.startswith("/ui")}
    assert set(tally.cases) == described - {"GET /openapi.json"}, "which is asked for what it describes"
    assert 500 not in tally.statuses
    assert {200, 400, 422} <= set(tally.statuses)
    assert not BUSY & set(tally.statuses), "one client at a time neither fills a queue nor meets a drain"
