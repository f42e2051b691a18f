"""Metrics as a view of events."""

from __future__ import annotations

import pytest

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    RefuseEvent,
    StepEvent,
    WaitEvent,
    WaitReason,
)
from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason
from everystop.core.rows import Row
from everystop.observe.catalogue import FAMILIES
from everystop.observe.history import Client
from everystop.observe.metrics import OTHERS, Metrics
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
    assert metrics.requests.queue_time.total == pytest.approx(0.020)
    assert metrics.requests.ttft.total == pytest.approx(0.050)
    assert metrics.requests.itl.total == pytest.approx(0.010)
    assert metrics.requests.e2e.total == pytest.approx(0.060)
    assert sum(metrics.requests.itl.counts) == sum(metrics.requests.e2e.counts) == 1
    assert metrics.finished["length"] == 1
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (0, 0, 0.0)


def test_the_end_that_stands_before_its_step_loses_no_token() -> None:
    metrics = counted(arrival(1), admit(1, 0), finish(1, 50), step(50, {1: (0, 10, 1)}))
    assert metrics.num_generation_tokens == 1
    assert sum(metrics.requests.ttft.counts) == 1


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
    assert sum(metrics.requests.queue_time.counts) == 2, "a resumed request has queued once"


def test_gauges_are_zero_after_all_have_been_aborted() -> None:
    """No step comes after the last abort that could say so."""
    metrics = counted(arrival(1), arrival(2), admit(1, 0), step(1, {1: (0, 10, 1)}, num_free=50))
    metrics.receive([finish(1, 2, FinishReason.ABORT), finish(2, 2, FinishReason.ABORT)])
    metrics.catch_up()
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (0, 0, 0.0)
    assert metrics.finished["abort"] == 2
    assert sum(metrics.requests.e2e.counts) == 0
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
    assert metrics.steps.num_over_target == 1
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
    assert 'tenant="who"' not in text
    assert "someone" not in text


def test_without_tenants_nobody_is_told_apart() -> None:
    metrics = counted(arrival(1)._replace(tenant="gold"), admit(1, 0), step(50, {1: (0, 10, 1)}))
    assert b"everystop_tenant" not in render(metrics, "m")


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its line without the value."""
    lines = render(metrics, "m").decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_phases_go_from_the_first_admission_over_the_first_token_to_the_last() -> None:
    """What a preemption costs lies in the phase in which it comes."""
    metrics = counted(
        arrival(1),
        admit(1, 20),
        step(50, {1: (0, 10, 1)}),
        PreemptEvent(55 * MS, 1, 1, 0, 11),
        admit(1, 70, resumed=True),
        step(80, {1: (0, 11, 1)}, recomputed=11),
        step(90, {1: (11, 1, 1)}),
        finish(1, 90)._replace(num_output_tokens=3, num_preemptions=1),
    )
    requests = metrics.requests
    assert requests.queue_time.sum == 20 * MS
    assert requests.prefill_time.sum == 30 * MS
    assert requests.decode_time.sum == 40 * MS
    assert requests.inference_time.sum == 70 * MS
    assert requests.time_per_output_token.sum == 20 * MS
    assert requests.num_preemptions.sum == 1
    assert (requests.prompt_tokens.sum, requests.generation_tokens.sum, requests.max_tokens.sum) == (10, 3, 5)


def test_times_begin_with_the_client_where_there_is_one() -> None:
    """Time to the first token from the last byte of its request, the queue from when the engine was told."""
    metrics = Metrics(num_blocks=100)
    metrics.came(Client("cmpl-1", "", 1, 1, received_ns=100 * MS, submitted_ns=104 * MS))
    metrics.receive([arrival(1, 110), admit(1, 120), step(150, {1: (0, 10, 1)}), finish(1, 150)])
    metrics.catch_up()
    requests = metrics.requests
    assert (requests.ttft.sum, requests.e2e.sum, requests.queue_time.sum) == (50 * MS, 50 * MS, 16 * MS)


def test_sizes_count_once_a_prompt_and_answers_once_a_choice() -> None:
    metrics = counted(
        arrival(1),
        arrival(2, choice=1),
        admit(1, 0),
        admit(2, 0, forked_from=1),
        finish(1, 50)._replace(num_output_tokens=2),
        finish(2, 60, FinishReason.ABORT)._replace(num_output_tokens=7),
    )
    requests = metrics.requests
    assert (requests.prompt_tokens.sum, requests.prompt_tokens.num) == (10, 1)
    assert (requests.num_choices.sum, requests.num_choices.num) == (2, 1)
    assert (requests.generation_tokens.sum, requests.generation_tokens.num) == (9, 2)
    assert (requests.longest_generation_tokens.sum, requests.longest_generation_tokens.num) == (7, 1)
    assert requests.e2e.num == 1, "an abort has no latency of a whole request"


def test_requests_that_never_got_a_token_have_no_phases() -> None:
    metrics = counted(arrival(1), admit(1, 0), finish(1, 50)._replace(num_output_tokens=0))
    assert (metrics.requests.e2e.num, metrics.requests.prefill_time.num, metrics.requests.decode_time.num) == (1, 0, 0)


def test_every_slot_of_a_step_is_in_one_state() -> None:
    """Four slots: one computes a prompt, one decodes, one row's client has left, and one slot is empty."""
    metrics = Metrics(num_blocks=100, num_slots=4)
    gone = finish(3, 45, FinishReason.ABORT)
    metrics.receive([arrival(1), arrival(2), arrival(3), *(admit(i, 0) for i in (1, 2, 3)), gone])
    metrics.receive([step(50, {1: (0, 10, 1), 2: (10, 1, 1), 3: (12, 1, 0)})])
    metrics.catch_up()
    states = {"prefill": 1, "decode": 1, "padding": 0, "held_finished": 0, "wasted": 1, "idle": 1}
    assert metrics.steps.slots == states
    assert metrics.occupancy == 0.5
    assert (metrics.steps.prefill_tokens.sum, metrics.steps.decode_tokens.sum, metrics.steps.tokens.sum) == (10, 1, 12)


def test_slots_of_finished_members_of_a_batch_are_held_or_padded() -> None:
    metrics = Metrics(num_blocks=100, num_slots=4)
    metrics.receive([arrival(1), arrival(2), arrival(3), *(admit(i, 0) for i in (1, 2, 3))])
    both = step(50, {1: (10, 1, 1), 2: (10, 1, 1), 3: (10, 1, 1)})
    metrics.receive([finish(2, 50), finish(3, 50), both._replace(num_held=2)])  # in this step they still computed
    padded = step(60, {1: (11, 1, 1), 2: (11, 1, 0)})
    padded.plan.num_padded_rows = 1
    metrics.receive([padded._replace(num_held=2)])
    metrics.catch_up()
    assert metrics.steps.slots == {
        "prefill": 0, "decode": 3 + 1, "padding": 1, "held_finished": 1, "wasted": 0, "idle": 1 + 1,
    }  # fmt: skip


def test_steps_that_computed_nothing_are_none() -> None:
    metrics = counted(arrival(1), admit(1, 0), step(50, {1: (0, 10, 1)}), step(60, {}))
    assert (metrics.num_steps, metrics.steps.execute_time.num, sum(metrics.steps.slots.values())) == (1, 1, 64)


def test_kv_blocks_are_used_cached_or_blank() -> None:
    metrics = counted(arrival(1), admit(1, 0), step(50, {1: (0, 10, 1)}, num_free=80)._replace(num_cached_blocks=30))
    assert metrics.kv_blocks == {"used": 20, "cached": 30, "blank": 50}
    metrics.receive([finish(1, 60, FinishReason.ABORT)])
    metrics.catch_up()
    assert metrics.kv_blocks == {"used": 0, "cached": 30, "blank": 70}


def test_reasons_that_keep_the_next_one_waiting_are_counted() -> None:
    wait = WaitEvent(0, 1, WaitReason.NO_BLOCKS, 4, 2, -1)
    metrics = counted(arrival(1), wait, wait._replace(reason=WaitReason.NO_SLOT), wait)
    metrics.receive([wait._replace(request_id=-1, reason=WaitReason.BEHIND)])
    metrics.catch_up()
    assert {reason: num for reason, num in metrics.blocked.items() if num} == {"no_blocks": 2, "no_slot": 1}
    assert "behind" not in metrics.blocked


def test_the_oldest_that_has_not_boarded_is_known() -> None:
    metrics = counted(arrival(1, 5), arrival(2, 9))
    assert metrics.oldest_ns == 5 * MS
    metrics.receive([admit(1, 10), PreemptEvent(11 * MS, 1, 1, 0, 0)])
    metrics.catch_up()
    assert metrics.oldest_ns == 9 * MS


def test_events_that_cannot_be_counted_cost_only_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault is logged once, counted each time, and nothing piles up behind it."""
    metrics = Metrics(num_blocks=100)
    count = Metrics._count

    def fail_at_odd(self: Metrics, event: Event) -> None:
        if isinstance(event, ArrivalEvent) and event.request_id % 2:
            raise ValueError("a counter went backwards")
        count(self, event)

    monkeypatch.setattr(Metrics, "_count", fail_at_odd)
    for request_id in range(6):
        metrics.receive([arrival(request_id)])
    metrics.catch_up()
    assert (metrics.num_failures, metrics.num_prompt_tokens) == (3, 30)
    assert len(caplog.records) == 1
    assert samples(metrics)['everystop_metrics_failures_total{model_name="m"}'] == 3


def test_tenants_nobody_has_named_do_not_grow_the_series() -> None:
    metrics = Metrics(num_blocks=100, tenants=("gold",))
    metrics.receive([arrival(0)._replace(tenant="gold"), admit(0, 0), step(1, {0: (0, 10, 1)}), finish(0, 1)])
    before = len(samples(metrics))
    for i in range(1, 1001):
        metrics.receive(
            [arrival(i)._replace(tenant=f"t{i}"), admit(i, 0), step(2, {i: (0, 10, 1)}), finish(i, 2)],
        )
    assert len(samples(metrics)) == before
    assert metrics.tenants[OTHERS].num_generation_tokens == 1000


def test_names_are_told_apart_and_carry_their_units() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("everystop_") for name in names)
    assert all(family.name.endswith("_total") == (family.kind == "counter") for family in FAMILIES)


def test_histograms_of_both_names_agree() -> None:
    metrics = counted(arrival(1), admit(1, 20), step(310, {1: (0, 10, 1)}), finish(1, 310))
    found = samples(metrics)
    ours, theirs = "everystop_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"
    labels = 'engine="0",le="{}",model_name="m"'
    for bound in ("0.25", "0.5", "+Inf"):
        own = found[f'{ours}_bucket{{le="{bound}",model_name="m"}}']
        assert found[f"{theirs}_bucket{{{labels.format(bound)}}}"] == own
    assert found[f'{theirs}_sum{{engine="0",model_name="m"}}'] == pytest.approx(0.31)
    assert f'{ours}_bucket{{le="0.0014",model_name="m"}}' in found, "fine below 300 ms"
