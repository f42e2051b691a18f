"""A trace in virtual time: figures that can be worked out by hand, always the same, in memory that does not grow."""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from everystop.core.errors import ConfigError
from everystop.core.events import ArrivalEvent, FinishEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan
from everystop.core.policy import POLICIES, PolicySettings, make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.rows import Row
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepFeatures
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import CostModel, StepCost
from everystop.sim.roofline import find_preset
from everystop.sim.routing import AFFINITY_SLACK, ROUTERS, RoundRobin, least_loaded, prefix_affinity
from everystop.sim.simulator import Setup, Simulation
from everystop.sim.tally import Histogram, Slo
from everystop.sim.traces import TraceRequest

MS = 10**6
STEADY = CostModel(step_ns=MS)
STOP = 1
LINE = CostModel(step_ns=MS, token_ns=20_000, decode_context_ns=50, prefill_pair_ns=10, row_ns=5_000, host_ns=1_000)


def make_setup(**changes: Any) -> Setup:
    limits: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
    limits |= {"target_itl_ns": None, "admission": "greedy"}
    limits |= {name: changes.pop(name) for name in tuple(changes) if name in limits}
    if "batch_wait_ns" in changes:
        changes["policy_settings"] = PolicySettings(batch_wait_ns=changes.pop("batch_wait_ns"))
    defaults: dict[str, Any] = {"num_blocks": 200, "block_size": 16, "cost": STEADY, "check": True}
    return Setup(limits=Limits(**limits), **(defaults | changes))


def traced(at_ms: float, num_prompt: int, num_output: int, **more: Any) -> TraceRequest:
    return TraceRequest(
        arrival_ns=round(at_ms * MS), num_prompt_tokens=num_prompt, num_output_tokens=num_output, **more
    )


def random_trace(num: int, *, seed: int = 1, gap_ms: float = 3.0, num_ids: int = 0) -> Iterator[TraceRequest]:
    dice, at_ms = Random(seed), 0.0
    for _ in range(num):
        at_ms += dice.uniform(0, 2 * gap_ms)
        ids = (dice.randrange(num_ids), 1_000 + dice.randrange(9)) if num_ids else ()
        tenant = dice.choice(("ann", "bob"))
        yield traced(
            at_ms, dice.randint(1, 128), dice.randint(1, 30), tenant=tenant, prefix_ids=ids, prefix_id_tokens=64
        )


def run(trace: Iterable[TraceRequest], **changes: Any) -> dict[str, Any]:
    return Simulation(make_setup(**changes)).run(trace)


def test_one_request_alone_takes_a_step_a_token() -> None:
    results = run([traced(0, 10, 4)])
    for name, ms in (("ttft_ms", 1.0), ("itl_ms", 1.0), ("tpot_ms", 1.0), ("e2e_ms", 4.0)):
        assert results[name]["max"] == results[name]["mean"] == ms, name
    assert (results["num_steps"], results["num_computed_tokens"], results["num_output_tokens"]) == (4, 13, 4)
    assert results["duration_s"] == 0.004
    assert results["replicas"] == [{"num_requests": 1, "busy_share": 1.0}]


def test_request_that_arrives_within_a_step_waits_for_its_end() -> None:
    """The step under way ends at 1 ms; the one that arrives at 0.25 ms gets its token at 2 ms."""
    results = run([traced(0, 4, 1), traced(0.25, 4, 1)])
    assert results["ttft_ms"]["max"] == 1.75
    assert results["e2e_ms"]["mean"] == (1 + 1.75) / 2


def test_idle_time_is_jumped_over() -> None:
    results = run([traced(0, 4, 1), traced(1e9, 4, 1)])
    assert results["num_steps"] == 2
    assert results["ttft_ms"]["max"] == 1.0
    assert results["duration_s"] == pytest.approx(1e6 + 0.001)


def test_static_batch_waits_to_fill_and_is_closed_to_others() -> None:
    """Two slots: the pair at 0 and 3 ms fills a batch and runs to 6 ms; the third waits 5 ms more for company."""
    trace = [traced(0, 4, 3), traced(3, 4, 1), traced(3.5, 4, 1)]
    results = run(trace, policy="static", batch_wait_ns=5 * MS, max_num_seqs=2)
    assert results["num_finished"] == 3
    assert results["duration_s"] == pytest.approx(0.0095)
    assert run(trace)["duration_s"] == pytest.approx(0.005)


def test_request_that_never_fits_is_counted_and_nobody_waits_for_it() -> None:
    results = run([traced(0, 5000, 4), traced(0, 10, 2)])
    assert (results["num_refused"], results["num_requests"], results["num_finished"]) == (1, 1, 1)


def test_prompt_that_would_fill_memory_is_refused_before_it_is_made() -> None:
    results = run([traced(0, 2**31 - 1, 4), traced(0, 10, 2)])
    assert (results["num_refused"], results["num_finished"]) == (1, 1)


def reference_run(trace: list[TraceRequest], setup: Setup) -> dict[str, list[int]]:
    """The durations of one replica, by the plainest loop: every arrival that is due, then a turn."""
    clock = Clock()
    kv = KVCache(
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        enable_prefix_caching=setup.enable_prefix_caching,
    )
    policy = make_policy(setup.policy, setup.policy_settings)
    scheduler = Scheduler(setup.limits, kv, policy, setup.measured_step_times())
    ends = {(i, one.num_prompt_tokens + one.num_output_tokens - 1) for i, one in enumerate(trace)}
    runner = SimulatedRunner(
        setup.cost.plan_ns,
        clock.advance,
        lambda request_id, num_tokens: STOP if (request_id, num_tokens) in ends else 0,
    )
    loop = StepLoop(scheduler, runner, lambda: clock.now_ns)
    arrived, tokens, ended = {}, {i: [] for i in range(len(trace))}, {}
    waiting = list(enumerate(trace))
    while waiting or scheduler.has_work:
        while waiting and waiting[0][1].arrival_ns <= clock.now_ns:
            i, one = waiting.pop(0)
            params = SamplingParams(max_tokens=setup.max_tokens or one.num_output_tokens, stop_token_ids=(STOP,))
            keys = one.block_keys(setup.block_size)
            request = Request(
                i,
                [i] * one.num_prompt_tokens,
                params,
                arrival_ns=one.arrival_ns,
                tenant=one.tenant,
                cache_salt=str(i),
                block_keys=keys,
            )
            scheduler.add(request, one.arrival_ns)
        turn = loop.turn()
        for event in turn.events:
            if isinstance(event, ArrivalEvent):
                arrived[event.request_id] = event.now_ns
            elif isinstance(event, FinishEvent):
                ended[event.request_id] = event.now_ns
            elif isinstance(event, StepEvent):
                for row, out in zip(event.plan.rows, event.tokens, strict=True):
                    tokens[row.request_id] += [event.now_ns] * len(out)
        if turn.is_idle:
            wakes = [turn.wake_at_ns, waiting[0][1].arrival_ns if waiting else None]
            clock.advance_to(min((at for at in wakes if at is not None), default=0))
    return {
        "ttft_ms": [times[0] - arrived[i] for i, times in tokens.items()],
        "itl_ms": [b - a for times in tokens.values() for a, b in itertools.pairwise(times)],
        "tpot_ms": [(times[-1] - times[0]) // (len(times) - 1) for times in tokens.values() if len(times) > 1],
        "e2e_ms": [ended[i] - arrived[i] for i in tokens],
    }


def test_oracle_knows_how_long_outputs_will_be() -> None:
    """One place, 1 ms a step: the first is at work when a long answer to a short prompt and the reverse arrive."""

    def trace() -> list[TraceRequest]:
        return [traced(0, 1, 5), traced(1, 10, 90), traced(1, 20, 2)]

    line = {"policy": "shortest", "max_num_seqs": 1, "policy_settings": PolicySettings(ageing_ns=10**12)}
    blind, knowing = run(trace(), **line), run(trace(), oracle=True, **line)
    assert blind["e2e_ms"]["mean"] == pytest.approx((5 + 94 + 96) / 3, abs=0.001)
    assert knowing["e2e_ms"]["mean"] == pytest.approx((5 + 6 + 96) / 3, abs=0.001)
    with pytest.raises(ConfigError, match="an oracle needs --policy shortest; the policy fair does not"):
        run(trace(), policy="fair", oracle=True)


@pytest.mark.parametrize("num_blocks", [200, 14])
@pytest.mark.parametrize("policy", POLICIES)
def test_figures_are_those_of_the_plainest_loop(policy: str, num_blocks: int) -> None:
    """Also where blocks are short and requests are preempted."""
    setup = make_setup(policy=policy, num_blocks=num_blocks, batch_wait_ns=4 * MS, cost=LINE)
    trace = list(random_trace(150, num_ids=4))
    results = Simulation(setup).run(trace)
    expected = reference_run(trace, setup)
    assert results["num_finished"] == 150
    assert results["num_preemptions"] > 0 or num_blocks == 200
    for name, durations in expected.items():
        histogram = Histogram()
        for ns in durations:
            histogram.add(ns)
        assert results[name] == histogram.in_ms(), name


@pytest.mark.parametrize("policy", ["continuous", "thrifty", "deadline"])
def test_figures_are_those_of_the_plainest_loop_where_admission_expects(policy: str) -> None:
    """Every request asks for 100 tokens and brings 1 to 30: both know its length when it has ended, not before."""
    setup = make_setup(policy=policy, num_blocks=20, cost=LINE, admission="expected", max_tokens=100)
    trace = list(random_trace(150, num_ids=4))
    results = Simulation(setup).run(trace)
    for name, durations in reference_run(trace, setup).items():
        assert results[name]["max"] == round(max(durations) / MS, 3), name
    knowing = reference_run(trace, replace(setup, max_tokens=None))
    assert max(knowing["ttft_ms"]) != round(results["ttft_ms"]["max"] * MS), "who knows each length does otherwise"


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_admission_cares_for_no_length_that_a_request_asks_for(policy: str) -> None:
    """What is refused is refused for its own length: 60 + 60 tokens do not fit the 8 blocks."""
    trace = [*random_trace(100, num_ids=4), traced(400, 60, 60), traced(401, 60, 30)]
    runs = [
        run(trace, policy=policy, num_blocks=8, batch_wait_ns=4 * MS, max_tokens=max_tokens, cost=LINE)
        for max_tokens in (None, 1, 70, 10_000)
    ]
    assert runs[0]["num_refused"] > 0
    assert all(results == runs[0] for results in runs)


def test_figures_are_those_of_the_plainest_loop_where_steps_are_planned_by_time() -> None:
    """A step of 64 tokens takes over 2 ms, so a target of 1.6 ms cuts prompts into smaller chunks."""
    setup, trace = make_setup(cost=LINE, target_itl_ns=1_600_000), list(random_trace(150, gap_ms=20.0))
    results = Simulation(setup).run(trace)
    for name, durations in reference_run(trace, setup).items():
        assert results[name]["max"] == round(max(durations) / MS, 3), name
    free = run(trace, cost=LINE)
    assert results["itl_ms"]["max"] < 1.7 < 2.2 < free["itl_ms"]["max"]


@pytest.mark.parametrize("cost", [LINE, find_preset("h200:llama-3.1-8b")])
def test_step_times_are_those_that_a_server_measures_at_its_start(cost: StepCost) -> None:
    """Whatever the cost model is, the scheduler starts with a line through a few steps with short contexts."""
    known = make_setup(cost=cost).measured_step_times()
    plan = StepPlan(0, [Row(i, 0, 1, 0, 0) for i in range(8)])
    assert known.execute_ns(StepFeatures.of(plan)) == pytest.approx(cost.plan_ns(plan), rel=0.05)
    assert not isinstance(known, CostModel)


def test_roofline_has_its_first_steps_planned_by_time() -> None:
    """A prompt joins a decode: in one chunk of 368 ms, also where nothing is known of step times, or in chunks of what
    is known at the start, which is too little by a fifth, since nothing longer than 128 tokens was measured.
    """
    cost = find_preset("h200:qwen3-32b")
    assert cost is not None
    trace = [traced(0, 1, 3), traced(1, 4_000, 3)]
    itl_ms = [
        run(trace, cost=cost, num_blocks=300, max_num_batched_tokens=8_192, target_itl_ns=target_ns)["itl_ms"]["max"]
        for target_ns in (None, 40 * MS)
    ]
    assert itl_ms[1] <= 40 * 1.3 < itl_ms[0] / 5


def test_tenants_add_up_to_everyone() -> None:
    results = run(random_trace(80))
    tenants = results["tenants"]
    assert sorted(tenants) == ["ann", "bob"]
    for name in ("num_requests", "num_finished", "num_prompt_tokens", "num_output_tokens"):
        assert sum(tenant[name] for tenant in tenants.values()) == results[name]
    assert max(tenant["e2e_ms"]["max"] for tenant in tenants.values()) == results["e2e_ms"]["max"]


def test_tenants_have_gaps_of_their_own() -> None:
    """Ann's two tokens come at 1 and 2 ms; Bob boards at 2 ms and has his at 3, 4 and 5 ms."""
    results = run([traced(0, 4, 2, tenant="ann"), traced(1.5, 4, 3, tenant="bob")], cost=STEADY)
    assert results["tenants"]["ann"]["itl_ms"]["max"] == 1.0
    stalled = [traced(0, 4, 30, tenant="ann"), traced(5.5, 60, 30, tenant="bob")]
    tenants = run(stalled, cost=LINE)["tenants"]
    assert tenants["ann"]["itl_ms"]["max"] > 1.5 * tenants["bob"]["itl_ms"]["max"], (
        "bob's prompt fell into ann's answer"
    )


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(ttft_ns=MS), 2),
        (Slo(ttft_ns=MS - 1), 0),
        (Slo(ttft_ns=7 * MS // 4), 3),
        (Slo(itl_ns=MS), 3),
        (Slo(itl_ns=MS - 1), 1),
        (Slo(ttft_ns=MS, itl_ns=MS - 1), 1),
    ],
)
def test_goodput_counts_requests_that_meet_every_demand(slo: Slo, num_good: int) -> None:
    """First tokens after 1, 1.75 and 1 ms; gaps of 1 ms, but for the last, which has one token. One is refused."""
    trace = [traced(0, 4, 3), traced(0.25, 4, 3), traced(9, 4, 1), traced(9, 5_000, 1)]
    results = run(trace, slo=slo)
    seconds = results["duration_s"]
    assert results["goodput"] == {"share": num_good / 4, "requests_per_s": round(num_good / seconds, 3)}
    assert results["tenants"][""]["good_share"] == pytest.approx(num_good / 3, abs=1e-6)
    assert run(trace)["goodput"] is None


def test_prefix_ids_hit_the_cache_and_other_prompts_do_not() -> None:
    """The second prompt shares 64 of its 100 tokens, 4 blocks of 16; a third is as long, but shares none."""
    trace = [traced(10 * i, 100, 2, prefix_ids=ids, prefix_id_tokens=64) for i, ids in enumerate([(7, 8), (7, 9), ()])]
    results = run(trace)
    assert results["prefix_hit_rate"] == pytest.approx(64 / 300, abs=1e-6)
    assert run(trace, enable_prefix_caching=False)["prefix_hit_rate"] == 0


def test_what_a_preemption_lost_is_counted_as_recomputed() -> None:
    """Two of 8 blocks each in a pool of 12, no prefix cache: the second gives up its place and prefills again."""
    trace = [traced(0, 60, 60), traced(0, 60, 60)]
    results = run(trace, num_blocks=12, enable_prefix_caching=False, max_num_batched_tokens=256)
    assert results["num_preemptions"] == 1
    assert results["num_recomputed_tokens"] > 60
    assert results["num_computed_tokens"] == 2 * 119 + results["num_recomputed_tokens"]


@pytest.mark.parametrize("router", ROUTERS)
def test_same_run_gives_the_same_bytes(router: str) -> None:
    once, again = (
        json.dumps(run(random_trace(200, gap_ms=0.5, num_ids=5), num_replicas=3, router=router, cost=LINE))
        for _ in range(2)
    )
    assert once == again


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_lose_nobody(policy: str, router: str) -> None:
    changes: dict[str, Any] = {"policy": policy, "batch_wait_ns": 4 * MS, "num_replicas": 4, "router": router}
    results = run(random_trace(300, gap_ms=0.3, num_ids=5), **changes)
    assert results["num_finished"] == sum(replica["num_requests"] for replica in results["replicas"]) == 300
    assert all(0 < replica["busy_share"] <= 1 for replica in results["replicas"])


def test_each_replica_of_a_round_robin_runs_as_if_alone() -> None:
    trace = list(random_trace(120))
    together = run(trace, num_replicas=2, cost=LINE)
    apart = [run(trace[i::2], cost=LINE) for i in range(2)]
    assert together["num_steps"] == sum(results["num_steps"] for results in apart)
    assert together["e2e_ms"]["max"] == max(results["e2e_ms"]["max"] for results in apart)
    assert together["duration_s"] == max(results["duration_s"] for results in apart)


class Place:
    """A replica as a router sees it."""

    def __init__(self, num: int, keys: tuple[bytes, ...] = ()) -> None:
        self._num = num
        self._keys = keys

    def num_present(self, now_ns: int) -> int:
        return self._num

    def num_matched(self, keys: Any) -> int:
        return len(list(itertools.takewhile(self._keys.__contains__, keys)))


def test_round_robin_takes_each_in_turn() -> None:
    choose = RoundRobin()
    assert [choose([Place(9), Place(0), Place(5)], [], 0) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_first_of_the_emptiest() -> None:
    assert least_loaded([Place(3), Place(1), Place(1)], [], 0) == 1


def test_prefix_affinity_gives_way_to_load() -> None:
    keys = [b"a", b"b"]
    near, far = Place(AFFINITY_SLACK, (b"a",)), Place(AFFINITY_SLACK + 1, (b"a", b"b"))
    assert prefix_affinity([Place(0), near, Place(0)], keys, 0) == 1
    assert prefix_affinity([Place(0), far, Place(0)], keys, 0) == 0
    assert prefix_affinity([far, Place(2), Place(1)], keys, 0) == 0, "the least loaded has one request by now"
    assert prefix_affinity([Place(2), Place(1), Place(1)], [], 0) == 1


def test_router_sees_requests_that_have_not_ended_by_then() -> None:
    """The step of 1 ms that ends the first request is under way at 0.5 ms, and over at 1.5 ms."""
    for at_ms, expected in ((0.5, [1, 1]), (1.5, [2, 0])):
        results = run([traced(0, 4, 1), traced(at_ms, 4, 1)], num_replicas=2, router="least-loaded")
        assert [replica["num_requests"] for replica in results["replicas"]] == expected


def test_prefix_affinity_finds_more_than_round_robin() -> None:
    rates = {
        router: run(random_trace(300, num_ids=6), num_replicas=4, num_blocks=40, router=router)["prefix_hit_rate"]
        for router in ("round-robin", "prefix-affinity")
    }
    assert rates["prefix-affinity"] > 1.2 * rates["round-robin"] > 0


def test_unknown_router_and_no_replica_are_refused() -> None:
    with pytest.raises(ConfigError, match="--router is 'random'"):
        run([], router="random")
    with pytest.raises(ConfigError, match="--replicas is 0"):
        run([], num_replicas=0)
    with pytest.raises(ConfigError, match="--router least-loaded has no choice with one replica"):
        run([], router="least-loaded")


def test_empty_trace_has_zeros() -> None:
    results = run([])
    assert results["num_requests"] == results["duration_s"] == results["ttft_ms"]["p99"] == 0


def test_memory_does_not_grow_with_the_trace() -> None:
    """The least of three runs, since tracemalloc also counts what other threads allocate meanwhile."""

    def peak(num: int) -> int:
        gc.collect()
        tracemalloc.start()
        run((traced(2 * i, 40, 3) for i in range(num)), num_blocks=20, check=False)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(100)
    few, many = (min(peak(num) for _ in range(3)) for num in (200, 2_000))
    assert many - few < 16 * 1_800, "something is kept for each request"


def test_histogram_is_within_its_bound() -> None:
    dice = Random(5)
    values = sorted(int(10 ** dice.uniform(0, 12)) for _ in range(2_000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for share, found in zip((1, 50, 99, 100), histogram.percentiles_ns((1, 50, 99, 100)), strict=True):
        assert found == pytest.approx(values[len(values) * share // 100 - 1], rel=0.002)
    assert histogram.max_ns == values[-1]
    assert histogram.total_ns == sum(values)
