"""What tenants were served, worked out by hand and against the plainest count."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from benchmarks.service import Gaps, bound, measure_capacity, served, widest_gap
from benchmarks.virtual import VirtualStage

from everystop.core.events import AdmitEvent, ArrivalEvent, Event, FinishEvent, PreemptEvent, StepEvent
from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason
from everystop.core.rows import Row
from everystop.sim.cost import CostModel
from everystop.sim.workloads import Dice, Kind, burst, in_order_of_time, make_workload, poisson
from everystop.trial.http_client import ClientRecord, Usage
from everystop.trial.http_load import LoadRun

KIND = Kind(prompt=(20, 60), output=(40, 80))
COST = CostModel(step_ns=5e6, token_ns=2e5)


def arrival(request_id: int, tenant: str, num_prompt: int) -> ArrivalEvent:
    return ArrivalEvent(0, request_id, request_id, 0, num_prompt, 8, tenant, 0)


def admit(request_id: int, num_tokens: int = 0, num_cached: int = 0) -> AdmitEvent:
    return AdmitEvent(0, 0, request_id, 0, num_tokens, num_cached, False, -1)


def preempt(request_id: int) -> PreemptEvent:
    return PreemptEvent(0, 0, request_id, 0, 0)


def finish(request_id: int) -> FinishEvent:
    return FinishEvent(0, 0, request_id, 0, FinishReason.LENGTH, "", 1, 1, 0, 0)


def step(**num_tokens: int) -> StepEvent:
    """One step that brought request r1 so many tokens, and so on."""
    rows = [Row(int(name[1:]), 0, 1, 0, 0) for name in num_tokens]
    plan = StepPlan(step_id=0, rows=rows)
    tokens = tuple((0,) * num for num in num_tokens.values())
    return StepEvent(0, 0, 0, plan, tokens, 0, 0, 0, 0, 0, 0, 0)


def queues(num: int = 4) -> list[Event]:
    """Tenant a has the even requests, b the odd ones."""
    return [arrival(i, "ab"[i % 2], 10) for i in range(2 * num)]


def test_service_counts_prompts_once_and_answers_twice_up_to_a_time() -> None:
    whole = ClientRecord(0, "a", 10, 3, sent_s=0.0, end_s=3.0, event_s=[1.0, 3.0], usage=Usage(10, 3))
    cut = ClientRecord(1, "a", 20, 9, sent_s=0.0, event_s=[2.0, 4.0], is_cut=True)
    silent = ClientRecord(2, "b", 30, 9, sent_s=0.0, is_cut=True)
    run = LoadRun("w", 0, [whole, cut, silent])
    assert served(run, 3.0) == {"a": 10 + 2 * 3 + 20 + 2 * 1, "b": 0}
    assert served(run, 1.5) == {"a": 10 + 2 * 1, "b": 0}
    assert served(run, 0.5) == {"a": 0, "b": 0}


def test_the_gap_is_the_widest_swing_while_both_wait() -> None:
    events: list[Event] = [*queues(), admit(0), admit(1), step(r0=5), step(r1=8)]
    assert widest_gap(events, {"a": 1.0, "b": 1.0}) == 16  # from +10 after step one to -6
    assert widest_gap(events, {"a": 1.0, "b": 2.0}) == 15  # up to +10 with a's prompt, then +5, +15, and down to +7


def test_a_window_ends_where_one_no_longer_waits() -> None:
    lonely: list[Event] = [arrival(0, "a", 10), arrival(2, "a", 10), admit(0), step(r0=500)]
    assert widest_gap(lonely, {"a": 1.0, "b": 1.0}) == 0
    both: list[Event] = [*lonely, arrival(1, "b", 10), step(r0=3)]
    assert widest_gap(both, {"a": 1.0, "b": 1.0}) == 6
    last_boards: list[Event] = [
        *both,
        admit(1),
        step(r0=100),
    ]  # b's prompt of 10 still counts, what comes after does not
    assert widest_gap(last_boards, {"a": 1.0, "b": 1.0}) == 10


def test_cached_tokens_a_second_boarding_and_strangers_cost_nothing() -> None:
    gaps = Gaps({"a": 1.0, "b": 1.0})
    gaps.note([*queues(), arrival(9, "", 50), admit(9), admit(0, num_cached=8), preempt(0), admit(0), step(r9=7)])
    assert gaps.served == {"a": 2, "b": 0}


def test_one_that_leaves_while_it_waits_ends_the_window() -> None:
    events: list[Event] = [arrival(0, "a", 1), arrival(1, "b", 1), arrival(2, "a", 1), admit(0), finish(1), step(r0=9)]
    assert widest_gap(events, {"a": 1.0, "b": 1.0}) == 1


def test_the_widest_gap_is_that_of_the_plainest_search_over_all_windows() -> None:
    """Random events; the plain version tries every window in which both wait."""
    dice = random.Random(3)
    for _ in range(20):
        weights = {"a": 1.0, "b": dice.choice([0.5, 1.0, 3.0])}
        events, plain = random_events(dice, weights)
        assert widest_gap(events, weights) == pytest.approx(plain)


def random_events(dice: random.Random, weights: dict[str, float]) -> tuple[list[Event], float]:
    """Events, and the widest difference over every window of services during which both tenants waited."""
    events: list[Event] = []
    services: list[tuple[float, int]] = []  # (signed amount, which stretch of both waiting)
    waiting: dict[str, list[int]] = {"a": [], "b": []}
    running: list[tuple[int, str]] = []
    stretch = num = 0
    for _ in range(120):
        tenant = dice.choice("ab")
        both = bool(waiting["a"] and waiting["b"])
        action = dice.choice(["arrive", "board", "step", "step"])
        sign = (1 if tenant == "a" else -1) / weights[tenant]
        if action == "arrive":
            events.append(arrival(num, tenant, dice.randint(1, 9)))
            waiting[tenant].append(num)
            num += 1
        elif action == "board" and waiting[tenant]:
            request_id = waiting[tenant].pop(0)
            running.append((request_id, tenant))
            events.append(admit(request_id))
            prompt = next(e for e in events if isinstance(e, ArrivalEvent) and e.request_id == request_id)
            if both:
                services.append((sign * prompt.num_prompt_tokens, stretch))
        elif action == "step" and running:
            request_id, owner = dice.choice(running)
            amount = dice.randint(1, 3)
            events.append(step(**{f"r{request_id}": amount}))
            if both:
                services.append(((1 if owner == "a" else -1) / weights[owner] * 2 * amount, stretch))
        if not (waiting["a"] and waiting["b"]):
            stretch += 1
    widest = 0.0
    for i, j in combinations(range(len(services) + 1), 2):
        window = services[i:j]
        if len({number for _, number in window}) == 1:
            widest = max(widest, abs(sum(amount for amount, _ in window)))
    return events, widest


def test_the_bound_grows_with_prompt_and_cache_and_falls_with_the_lesser_weight() -> None:
    assert bound(100, 10, {"a": 1.0, "b": 3.0}) == 200
    assert bound(100, 1000, {"a": 1.0, "b": 0.5}) == 8000


def test_capacity_is_what_the_machine_does_while_somebody_waits() -> None:
    """16 rows a step, each 1 of 60 output tokens and its share of a prompt of 40: 5 ms and 0.2 ms a token."""
    options = ["--max-num-seqs", "16", "--max-model-len", "192"]
    capacity = measure_capacity(VirtualStage(COST), KIND, options)
    tokens_per_step = 16 * (1 + 40 / 60)
    expected = 16 / (5e-3 + 2e-4 * tokens_per_step) * KIND.mean_cost / 60
    assert capacity == pytest.approx(expected, rel=0.1)


def test_virtual_clients_see_what_the_scheduler_did() -> None:
    workload = in_order_of_time("w", poisson(Dice("w", 1), KIND, "a", per_s=4, seconds=3))
    trial = VirtualStage(COST).play(workload, ["--max-model-len", "192"], wants_events=True)
    assert [record.usage for record in trial.run.records] == [Usage(len(j.prompt), j.max_tokens) for j in workload.jobs]
    for record, job in zip(trial.run.records, workload.jobs, strict=True):
        assert record.sent_s == job.at_s
        assert record.sent_s < record.event_s[0] < record.event_s[-1] == record.end_s
        assert len(record.event_s) == job.max_tokens
    assert sum(isinstance(event, FinishEvent) for event in trial.events) == len(workload.jobs)
    assert not VirtualStage(COST).play(workload, ["--max-model-len", "192"]).events
    late = VirtualStage(replace(COST, request_ns=1e6)).play(workload, ["--max-model-len", "192"])
    assert late.run.records[0].event_s[0] == pytest.approx(trial.run.records[0].event_s[0] + 1e-3)


def test_virtual_time_is_cut_off_where_it_is_told_to_end() -> None:
    workload = in_order_of_time("w", burst(Dice("w", 1), KIND, "a", 40))
    trial = VirtualStage(COST).play(workload, ["--max-num-seqs", "2", "--max-model-len", "192"], stop_s=1.0)
    cut = [record for record in trial.run.records if record.is_cut]
    assert 30 <= len(cut) < 40
    assert max(when for record in trial.run.records for when in record.event_s) < 1.1


def test_virtual_time_refuses_what_it_cannot_honour() -> None:
    closed = in_order_of_time("w", burst(Dice("w", 1), KIND, "a", 1))
    with pytest.raises(SystemExit, match="kv-cache-memory"):
        VirtualStage(COST).play(closed, ["--max-model-len", "192", "--kv-cache-memory", "1g"])
    with pytest.raises(SystemExit, match="without a time"):
        VirtualStage(COST).play(make_workload("single"), ["--max-model-len", "192"])
