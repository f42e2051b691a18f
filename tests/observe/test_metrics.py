"""Metrics as a view of events."""

from __future__ import annotations

import pytest

from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, PreemptEvent, RefuseEvent, StepEvent
from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason
from everystop.core.rows import Row
from everystop.observe.metrics import OTHERS, Histogram, Metrics
from everystop.observe.prometheus import render
from everystop.observe.stats import StatusLine

MS = 1_000_000


def arrival(request_id: int, now_ms: int = 0, *, num_prompt: int = 10, choice: int = 0) -> ArrivalEvent:
    return ArrivalEvent(now_ms * MS, request_id, request_id - choice, choice, num_prompt, 5, "", 0)


def admit(request_id: int, now_ms: int, *, cached: int = 0, resumed: bool = False, forked_from: int = -1) -> AdmitEvent:
    return AdmitEvent(now_ms * MS, 0, request_id, 0, 10, cached, resumed, forked_from)


def step(now_ms: int, rows: dict[int, tuple[int, int, int]], *, num_free: int = 90, recomputed: int = 0) -> StepEvent:
    """`rows`: request id to (start, tokens computed, tokens sampled)."""
    plan = StepPlan(0, [Row(key, start, num, 0, 0) for key, (start, num, _) in rows.items()])
    tokens = tuple((7,) * sampled for _, _, sampled in rows.values())
    return StepEvent(now_ms * MS, 0, 3 * MS, plan, tokens, 0, 0, 0, num_free, 0, 0, 0, num_recomputed_tokens=recomputed)


def finish(request_id: int, now_ms: int, reason: FinishReason = FinishReason.LENGTH, *, cached: int = 0) -> FinishEvent:
    return FinishEvent(now_ms * MS, 0, request_id, 0, reason, "", 10, 2, cached, 0)


def counted(*events: Event) -> Metrics:
    metrics = Metrics(num_blocks=100)
    metrics.receive(list(events))
    metrics.catch_up()
    return metrics


def test_a_life_is_counted_once() -> None:
    metrics = counted(
        arrival(1), admit(1, 20, cached=4), step(50, {1: (4, 6, 1)}), step(60, {1: (10, 1, 1)}), finish(1, 60, cached=4)
    )
    assert (metrics.num_prompt_tokens, metrics.num_computed_prompt_tokens, metrics.num_generation_tokens) == (10, 6, 2)
    assert (metrics.num_prefix_queries, metrics.num_prefix_hits) == (10, 4)
    assert metrics.queue_time.total == pytest.approx(0.020)
    assert metrics.ttft.total == pytest.approx(0.050)
    assert metrics.itl.total == pytest.approx(0.010)
    assert metrics.e2e.total == pytest.approx(0.060)
    assert sum(metrics.itl.counts) == sum(metrics.e2e.counts) == 1
    assert metrics.finished["length"] == 1
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (0, 0, 0.0)


def test_the_end_that_stands_before_its_step_loses_no_token() -> None:
    metrics = counted(arrival(1), admit(1, 0), finish(1, 50), step(50, {1: (0, 10, 1)}))
    assert metrics.num_generation_tokens == 1
    assert sum(metrics.ttft.counts) == 1


def test_gauges_follow_admission_preemption_and_the_end() -> None:
    metrics = counted(arrival(1), arrival(2), admit(1, 0), step(1, {1: (0, 10, 1)}, num_free=75))
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (1, 1, 0.25)
    metrics.receive([PreemptEvent(2 * MS, 1, 1, 0, 11)])
    metrics.catch_up()
    assert (metrics.num_running, metrics.num_waiting) == (0, 2)
    assert (metrics.num_preemptions, metrics.num_preempted_tokens) == (1, 11)
    metrics.receive([admit(1, 3, resumed=True), admit(2, 3)])
    metrics.catch_up()
    assert (metrics.num_running, metrics.num_waiting) == (2, 0)
    assert sum(metrics.queue_time.counts) == 2, "a resumed request has queued once"


def test_gauges_are_zero_after_all_have_been_aborted() -> None:
    """No step comes after the last abort that could say so."""
    metrics = counted(arrival(1), arrival(2), admit(1, 0), step(1, {1: (0, 10, 1)}, num_free=50))
    metrics.receive([finish(1, 2, FinishReason.ABORT), finish(2, 2, FinishReason.ABORT)])
    metrics.catch_up()
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (0, 0, 0.0)
    assert metrics.finished["abort"] == 2
    assert sum(metrics.e2e.counts) == 0
    assert metrics.num_prompt_tokens == 20


def test_choices_share_one_prompt() -> None:
    metrics = counted(arrival(1), arrival(2, choice=1), admit(1, 0), admit(2, 0, cached=9, forked_from=1))
    assert (metrics.num_prompt_tokens, metrics.num_prefix_queries, metrics.num_prefix_hits) == (10, 10, 0)


def test_late_prefix_hits_are_counted_at_the_end() -> None:
    metrics = counted(arrival(1), admit(1, 0, cached=2), finish(1, 9, cached=8))
    assert metrics.num_prefix_hits == 8


def test_what_a_preempted_request_finds_again_is_no_prefix_hit() -> None:
    """It had computed 11 tokens: 8 are still in the cache, 3 are computed again."""
    metrics = counted(
        arrival(1),
        admit(1, 0, cached=4),
        step(1, {1: (4, 6, 1)}),
        PreemptEvent(2 * MS, 1, 1, 0, 11),
        admit(1, 3, cached=8, resumed=True),
        step(4, {1: (8, 3, 1)}, recomputed=3),
        finish(1, 9, cached=4),
    )
    assert metrics.num_prefix_hits == 4
    assert (metrics.num_restored_tokens, metrics.num_recomputed_tokens) == (8, 3)
    text = render(metrics, "m").decode()
    assert 'everystop_recomputed_tokens_total{model_name="m"} 3.0' in text
    assert 'everystop_restored_tokens_total{model_name="m"} 8.0' in text
    assert 'everystop_prefix_cache_hits_total{model_name="m"} 4.0' in text


def test_a_dead_engine_leaves_no_gauges_behind() -> None:
    metrics = counted(arrival(1), admit(1, 0))
    metrics.forget_running()
    assert metrics.num_running == 0
    assert metrics.num_prompt_tokens == 10


def test_rendering_has_every_family_and_cumulative_buckets() -> None:
    metrics = counted(
        arrival(1), admit(1, 20), step(50, {1: (0, 10, 1)}), finish(1, 60), RefuseEvent(0, 2, "NeverFits")
    )
    text = render(metrics, "m").decode()
    assert 'everystop_num_requests_running{model_name="m"} 0.0' in text
    assert 'everystop_request_success_total{finished_reason="length",model_name="m"} 1.0' in text
    assert 'everystop_requests_refused_total{error="NeverFits",model_name="m"} 1.0' in text
    assert 'everystop_time_to_first_token_seconds_bucket{le="0.04",model_name="m"} 0.0' in text
    assert 'everystop_time_to_first_token_seconds_bucket{le="0.06",model_name="m"} 1.0' in text
    assert 'everystop_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 1.0' in text
    assert 'everystop_time_to_first_token_seconds_count{model_name="m"} 1.0' in text


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.add(value)
    assert histogram.cumulative() == [("1", 2.0), ("2", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 8


def test_status_line_tells_of_the_time_since_the_last_one() -> None:
    metrics = Metrics(num_blocks=100)
    status = StatusLine(metrics, 0.0)
    assert status.next(1.0) is None
    metrics.receive([arrival(1), admit(1, 0), step(50, {1: (0, 10, 1)}), step(60, {1: (10, 1, 1)})])
    line = status.next(3.0)
    assert line == "running 1  waiting 0  KV 10%  in 5 tok/s  out 1 tok/s  steps 1/s  prefix hits 0%  preemptions 0"
    metrics.receive([finish(1, 70)])
    assert status.next(4.0) is None


def test_status_line_tells_what_preemptions_cost() -> None:
    metrics = Metrics(num_blocks=100)
    status = StatusLine(metrics, 0.0)
    metrics.receive([arrival(1), admit(1, 0), step(50, {1: (0, 10, 1)}), PreemptEvent(51 * MS, 1, 1, 0, 10)])
    metrics.receive([admit(1, 60, resumed=True), step(70, {1: (0, 10, 0)}, recomputed=1_010)])
    line = status.next(3.0)
    assert line is not None
    assert line.endswith("preemptions 1 (1,010 tokens recomputed)")


def test_steps_whose_target_was_out_of_reach_are_counted_and_said() -> None:
    def planned(now_ms: int, target_ms: int, predicted_ms: int) -> StepEvent:
        return step(now_ms, {1: (0, 1, 1)})._replace(target_ns=target_ms * MS, predicted_ns=predicted_ms * MS)

    metrics = Metrics(num_blocks=100)
    status = StatusLine(metrics, 0.0)
    metrics.receive(
        [arrival(1), admit(1, 0), planned(10, 20, 20), planned(20, 20, 19), planned(40, 20, 25), step(50, {})]
    )
    line = status.next(1.0)
    assert line is not None
    assert "target 0 ms" not in line
    assert metrics.num_steps_over_target == 1
    metrics.receive([planned(60, 20, 30)])
    assert "target 20 ms out of reach in 100% of steps" in (status.next(2.0) or "")
    assert b'everystop_steps_over_target_total{model_name="m"} 2.0' in render(metrics, "m")
    assert b'everystop_step_target_seconds{model_name="m"} 0.02' in render(metrics, "m")


def test_tenants_of_the_file_are_told_apart_and_all_others_counted_together() -> None:
    metrics = Metrics(num_blocks=100, tenants=("gold", "tin"))
    metrics.receive(
        [
            arrival(1)._replace(tenant="gold"),
            arrival(2, choice=1)._replace(tenant="gold"),
            arrival(3)._replace(tenant="who"),
            arrival(4)._replace(tenant="someone"),
            admit(1, 0),
            admit(3, 0),
            step(50, {1: (0, 10, 1), 3: (0, 10, 0)}),
            step(60, {1: (10, 1, 1), 3: (0, 10, 1)}),
            finish(1, 60),
            admit(2, 60),
            step(80, {2: (9, 1, 1)}),
            RefuseEvent(0, 5, "TenantQueueFull", "gold"),
            RefuseEvent(0, 6, "NeverFits", "else"),
        ]
    )
    metrics.catch_up()
    assert list(metrics.tenants) == ["gold", "tin", OTHERS]
    gold, tin, others = metrics.tenants.values()
    assert (gold.num_prompt_tokens, gold.num_generation_tokens, gold.num_refused) == (10, 3, 1)
    assert (others.num_prompt_tokens, others.num_generation_tokens, others.num_refused) == (10, 1, 1)
    assert tin.num_generation_tokens == sum(tin.ttft.counts) == 0
    assert gold.ttft.total == pytest.approx(0.050 + 0.080)
    assert others.ttft.total == pytest.approx(0.060)
    assert metrics.num_by_tenant(is_running=True) == {"gold": 1, OTHERS: 1, "tin": 0}
    assert metrics.num_by_tenant(is_running=False) == {"gold": 0, OTHERS: 1, "tin": 0}
    text = render(metrics, "m").decode()
    assert 'everystop_tenant_num_requests_running{model_name="m",tenant="gold"} 1.0' in text
    assert 'everystop_tenant_num_requests_waiting{model_name="m",tenant="other"} 1.0' in text
    assert 'everystop_tenant_prompt_tokens_total{model_name="m",tenant="gold"} 10.0' in text
    assert 'everystop_tenant_generation_tokens_total{model_name="m",tenant="tin"} 0.0' in text
    assert 'everystop_tenant_requests_refused_total{model_name="m",tenant="gold"} 1.0' in text
    ttft = "everystop_tenant_time_to_first_token_seconds"
    assert ttft + '_bucket{le="0.06",model_name="m",tenant="gold"} 1.0' in text
    assert ttft + '_count{model_name="m",tenant="other"} 1.0' in text
    assert "who" not in text
    assert "someone" not in text


def test_without_tenants_nobody_is_told_apart() -> None:
    metrics = counted(arrival(1)._replace(tenant="gold"), admit(1, 0), step(50, {1: (0, 10, 1)}))
    assert b"tenant" not in render(metrics, "m")
