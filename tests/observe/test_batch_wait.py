"""How long static batches waited for company, and when that is spoken of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.observe.report_runs import make_comparison

from everystop.observe.batch_wait import batch_wait_remarks, batch_waits
from everystop.observe.comparison import Comparison

WAIT_NS = 40_000_000
ONE_BY_ONE = ((24, 2, 0), (24, 2, 400), (24, 2, 800))
FULL = tuple((24, 20, 0) for _ in range(16))


def waiting(jobs: tuple[tuple[int, int, int], ...], *policies: str) -> Comparison:
    """Runs whose static batches wait 40 ms; another policy takes no such argument."""
    own = {"static": {"batch_wait_ns": WAIT_NS}}
    runs = [make_comparison(jobs, [policy], **own.get(policy, {})) for policy in policies]
    merged = replace(runs[0], policies=policies, runs=tuple(run for each in runs for run in each.runs))
    return replace(merged, settings=dict(merged.settings) | {"batch_wait_ms": {"static": 40}})


def test_each_batch_has_its_wait_and_each_request_its_own() -> None:
    found = batch_waits(waiting(ONE_BY_ONE, "static").runs_of("static")[:1])
    assert found.batches_ns == pytest.approx([WAIT_NS] * 3, rel=0.05)
    assert found.requests_ns == sum(found.batches_ns)
    late = batch_waits(waiting(((24, 2, 0), (24, 2, 10)), "static").runs_of("static")[:1])
    assert late.batches_ns == pytest.approx([WAIT_NS], rel=0.05)
    assert late.requests_ns == pytest.approx(WAIT_NS + WAIT_NS - 10_000_000, rel=0.05)


def test_a_batch_that_fills_at_once_has_not_waited() -> None:
    assert batch_waits(waiting(FULL, "static").runs).batches_ns == ()
    assert list(batch_wait_remarks(waiting(FULL, "static", "continuous"))) == []


@pytest.mark.parametrize("policies", [("static", "continuous"), ("continuous", "static")])
def test_the_wait_is_spoken_of_where_it_is_much_of_a_difference(policies: tuple[str, str]) -> None:
    [said] = batch_wait_remarks(waiting(ONE_BY_ONE, *policies))
    assert said.startswith("static waited for company before 6 batches, 40.")
    assert "(--batch-wait-ms 40): time in which it computed nothing" in said
    assert "of the difference in mean TTFT" in said
    assert said.endswith("to continuous; --batch-wait-ms 0 leaves it out.")


def test_a_small_part_of_a_difference_is_not_spoken_of() -> None:
    """The first waits 10 ms for the others, and then long batches follow."""
    jobs = tuple((24, 100 if i % 8 == 0 else 5, min(i, 1) * 10) for i in range(64))
    comparison = waiting(jobs, "static", "continuous")
    assert len(batch_waits(comparison.runs_of("static")).batches_ns) == 2
    assert list(batch_wait_remarks(comparison)) == []
