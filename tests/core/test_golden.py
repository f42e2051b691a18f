"""The scheduler makes the very plans of the golden logs, which a reviewer has read."""

from __future__ import annotations

import pytest
from tests.core import golden_runs

from everystop.core.events import AdmitEvent
from everystop.core.policy import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_equal_the_golden_log(policy: str) -> None:
    expected = (golden_runs.FOLDER / f"{policy}.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(golden_runs.lines(golden_runs.run(policy).plans)) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_scenario_covers_what_a_plan_can_say(policy: str) -> None:
    harness = golden_runs.run(policy)
    plans = harness.plans
    assert any(plan.preempted for plan in plans)
    assert any(plan.copies for plan in plans)
    assert any(plan.new_blocks for plan in plans)
    assert any(row.logits_from == row.num_tokens for plan in plans for row in plan.rows), "no prompt was chunked"
    assert any(plan.num_padded_rows for plan in plans) == (policy == "static-padded")
    assert any(e.num_cached_tokens and not e.resumed for e in harness.events if isinstance(e, AdmitEvent))
    assert {event.reason for event in harness.finished.values()} >= {"length", "abort", "error"}
