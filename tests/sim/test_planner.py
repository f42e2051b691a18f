"""Plans of loads whose capacity can be worked out by hand, or by a queue that needs no scheduler."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tests.sim.test_simulator import make_setup, traced

from everystop.core.errors import ConfigError
from everystop.sim.cost import CostModel
from everystop.sim.parallel import Workers
from everystop.sim.plan_report import as_toml, as_yaml, describe_plan, plan_figures
from everystop.sim.planner import TOLERANCE, Plan, Price, Question, default_rates, make_plan, short
from everystop.sim.probe import WARM_UP_SHARE, Target, Traffic, measure, saturation
from everystop.sim.simulator import Setup
from everystop.sim.traces import TraceRequest

MS = 10**6
STEP_MS = 10
STEADY = CostModel(step_ns=STEP_MS * MS, source="a test")
NUM = 200
WIDE = Target(ttft_p95_ms=1e6, itl_p95_ms=1e6)


def poisson(num: int = NUM, *, num_prompt: int = 1, num_output: int = 1, seed: int = 3) -> Traffic:
    """Requests of one length at one a second on average."""
    dice, at_ms, requests = Random(seed), 0.0, []
    for _ in range(num):
        requests.append(traced(at_ms, num_prompt, num_output))
        at_ms += 1000 * dice.expovariate(1)
    return Traffic(requests)


def setup_of(slots: int, **changes: Any) -> Setup:
    defaults = {"cost": STEADY, "max_num_seqs": slots, "max_num_batched_tokens": 64, "check": False}
    return make_setup(**(defaults | changes))


def plan_of(workload: Traffic, setup: Setup, jobs: int = 1, **question: Any) -> Plan:
    asked = Question(**({"target": WIDE, "replicas": (1,), "num_requests": NUM, "is_searching": False} | question))
    with Workers(jobs) as workers:
        return make_plan(asked, workload, setup, workers, lambda what, num, num_all: None)


def figures_of(plan: Plan, **given: Any) -> dict[str, Any]:
    return plan_figures(plan, trace={"file": "trace.csv"}, given=given)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_cliff_is_what_the_slots_can_serve(num_replicas: int) -> None:
    """4 slots, 10 steps of 10 ms a request: 40 requests a second for each replica."""
    setup = setup_of(4, num_replicas=num_replicas)
    assert saturation(setup, poisson(num_output=10), NUM * num_replicas) == pytest.approx(40 * num_replicas, rel=1e-9)


def test_cliff_of_requests_of_many_lengths_is_their_mean_need() -> None:
    """One slot: a request of n tokens takes n steps, whatever order they come in."""
    dice = Random(5)
    lengths = [dice.randint(1, 40) for _ in range(NUM)]
    workload = Traffic([traced(100 * i, 1, length) for i, length in enumerate(lengths)])
    expected = 1000 / (STEP_MS * sum(lengths) / NUM)
    assert saturation(setup_of(1), workload, NUM) == pytest.approx(expected, rel=1e-9)


def test_cliff_with_a_router_that_looks_into_caches_counts_the_hits() -> None:
    """Prompts of 16 chunks; after the first of each of 4 kinds all but the last block comes from a replica's cache."""
    requests = [traced(100 * i, 256, 1, prefix_ids=(i % 4,), prefix_id_tokens=256) for i in range(NUM)]
    setup = setup_of(2, max_num_batched_tokens=16, num_replicas=2, router="prefix-affinity")
    found = saturation(setup, Traffic(requests), NUM)
    without = saturation(dataclasses.replace(setup, enable_prefix_caching=False), Traffic(requests), NUM)
    assert found > 5 * without


def percentile_of_one_server_queue(workload: Traffic, rate: float) -> float:
    """p95 of waiting and service in ms by Lindley's recursion: one server, service of one step, no first fifth."""
    arrivals = [request.arrival_ns / MS for request in workload.at(rate, NUM)]
    waits = [0.0]
    for before, now in itertools.pairwise(arrivals):
        waits.append(max(0.0, waits[-1] + STEP_MS - (now - before)))
    measured = sorted(wait + STEP_MS for wait in waits[int(NUM * WARM_UP_SHARE) :])
    return measured[math.ceil(0.95 * len(measured)) - 1]


@pytest.mark.parametrize("target_ms", [15, 30, 60])
def test_highest_rate_is_that_of_a_queue_without_a_scheduler(target_ms: float) -> None:
    workload = poisson()
    plan = plan_of(workload, setup_of(1), target=Target(ttft_p95_ms=target_ms, itl_p95_ms=1e6), rates=[10, 95])
    found = plan.carried[0].rate
    rates = [2 * 1.005**i for i in range(800)]
    first_missed = next(rate for rate in rates if percentile_of_one_server_queue(workload, rate) > 1.003 * target_ms)
    assert found <= 1.003 * first_missed
    assert found > first_missed / TOLERANCE / 1.02
    assert plan.carried[0].limit == ("ttft",)


def test_percentile_of_a_point_is_that_of_a_queue_without_a_scheduler() -> None:
    workload = poisson()
    for rate in (20, 60, 90):
        point = measure(setup_of(1), workload, rate=rate, num_requests=NUM, target=WIDE)
        assert point.ttft_ms["p95"] == pytest.approx(percentile_of_one_server_queue(workload, rate), rel=0.003)


def test_more_replicas_carry_more_at_no_worse_latency() -> None:
    target = Target(ttft_p95_ms=40, itl_p95_ms=20)
    plan = plan_of(
        poisson(num_output=5), setup_of(4), target=target, replicas=(4, 2, 1), rates=[40, 80], rate=40, num_requests=100
    )
    assert [carried.num_replicas for carried in plan.carried] == [1, 2, 4]
    for fewer, more in itertools.pairwise(plan.carried):
        assert more.rate > 1.5 * fewer.rate
        assert more.cliff == pytest.approx(2 * fewer.cliff, rel=0.02)
    for rate in plan.rates:
        column = [point for point in plan.points if point.rate == rate and point.is_stable]
        assert [point.ttft_ms["p95"] for point in column] == sorted((p.ttft_ms["p95"] for p in column), reverse=True)


def test_rates_beyond_the_cliff_are_unstable_with_the_reason() -> None:
    plan = plan_of(poisson(), setup_of(1), replicas=(1, 2), rates=[50, 99, 100, 150], rate=50)
    stable = {(point.num_replicas, point.rate): point.is_stable for point in plan.points}
    assert stable == {(num, rate): rate < 100 * num for num in (1, 2) for rate in (50, 99, 100, 150)}
    [point] = [point for point in plan.points if (point.num_replicas, point.rate) == (1, 150)]
    assert point.reason == "150 requests/s arrive, at most 100 can be served"
    assert point.missed == ("overload",)


def test_point_whose_queue_grows_is_given_up_long_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_ns, num_steps = CostModel.plan_ns, 0

    def counting(self: CostModel, plan: Any) -> int:
        nonlocal num_steps
        num_steps += 1
        return plan_ns(self, plan)

    monkeypatch.setattr(CostModel, "plan_ns", counting)
    point = measure(setup_of(1), poisson(2000), rate=300, num_requests=2000, target=WIDE)
    assert point.reason == "more than 500 of 2,000 requests waited at once"
    assert num_steps < 300, "500 wait when about 750 have come, a third of which has been served"


def test_hasty_point_is_given_up_once_its_ttft_is_certain_to_miss() -> None:
    kwargs: dict[str, Any] = {"rate": 95, "num_requests": NUM, "target": Target(ttft_p95_ms=15, itl_p95_ms=1e6)}
    assert measure(setup_of(1), poisson(), is_hasty=True, **kwargs).missed == ("ttft",)
    assert measure(setup_of(1), poisson(), is_hasty=True, **kwargs).ttft_ms == {}
    assert measure(setup_of(1), poisson(), **kwargs).ttft_ms["p95"] > 15


def test_warm_up_is_left_out() -> None:
    """The first requests queue behind one of 100 steps; those after the first fifth arrive at an idle server."""
    slow = [traced(0, 1, 100)] + [traced(10 * i, 1, 1) for i in range(1, 10)]
    quiet = [traced(5000 + 100 * i, 1, 1) for i in range(90)]
    point = measure(setup_of(1), Traffic(slow + quiet), rate=_rate(slow + quiet), num_requests=100, target=WIDE)
    assert point.num_requests == 80
    assert point.ttft_ms["max"] == STEP_MS
    assert point.busy_share == pytest.approx(0.1, rel=0.02)
    assert point.output_tokens_per_s == pytest.approx(10, rel=0.02)


def _rate(requests: Sequence[TraceRequest]) -> float:
    return Traffic(requests).rate


def test_rates_dilate_the_trace_and_laps_share_no_prefix() -> None:
    requests = [traced(at, 100, 1, prefix_ids=(at,), prefix_id_tokens=64) for at in (0, 10, 30)]
    workload = Traffic(requests)
    assert workload.rate == pytest.approx(2 / 0.03)
    halved = workload.at(workload.rate / 2, 7)
    assert [request.arrival_ns / MS for request in halved] == pytest.approx([0, 20, 60, 90, 110, 150, 180], abs=1e-3)
    assert len({request.prefix_ids for request in halved}) == 7
    assert [request.arrival_ns for request in workload.at(math.inf, 5)] == [0] * 5
    assert [workload.whole_laps(num) for num in (2, 3, 4, 7)] == [2, 3, 6, 9]


def test_trace_without_a_rate_is_refused() -> None:
    for requests in ([traced(0, 1, 1)], [traced(5, 1, 1)] * 3, []):
        with pytest.raises(ConfigError, match="no rate that could be changed"):
            Traffic(requests)


def test_answer_is_the_fewest_replicas_and_costs_what_they_cost() -> None:
    """At 150 requests a second of 2 steps with 2 slots, 100 a second each: two replicas."""
    plan = plan_of(
        poisson(num_output=2), setup_of(2), replicas=(1, 2, 3), rate=150, price=Price(per_hour=3.6, currency="CHF")
    )
    figures = figures_of(plan)
    best = figures["answer"]["best"]
    assert (best["num_replicas"], best["cost_per_hour"]) == (2, 7.2)
    per_token = 7.2 / 3600 / best["output_tokens_per_s"]
    assert best["cost_per_million_output_tokens"] == pytest.approx(per_token * 1e6, rel=1e-4)
    assert best["output_tokens_per_s"] == pytest.approx(300, rel=0.1)
    text = describe_plan(figures)
    assert text.startswith("2 replicas carry 150 requests/s: TTFT p95 ")
    assert "the queue grows without bound from 200 requests/s." in text
    assert "That costs 7.20 CHF an hour, " in text


def test_other_flags_save_replicas() -> None:
    """Prompts of 32 tokens under a budget of 4 take 8 steps, 12.5 a second; under 16 they take 2, and one replica is
    enough for 20 a second.
    """
    setup = setup_of(4, max_num_batched_tokens=4)
    asked: dict[str, Any] = {"replicas": (1, 2, 3), "rate": 20, "target": Target(ttft_p95_ms=500, itl_p95_ms=50)}
    asked |= {"num_requests": 40, "rates": [20]}
    given = plan_of(poisson(num_prompt=32), setup, **asked)
    tuned = plan_of(poisson(num_prompt=32), setup, is_searching=True, **asked)
    assert given.chosen is not None
    assert tuned.chosen is not None
    assert (given.chosen.num_replicas, tuned.chosen.num_replicas) == (2, 1)
    assert tuned.tuned.limits.max_num_batched_tokens >= 16
    figures = figures_of(tuned, policy="shortest", enable_prefix_caching=False, block_size=16)
    num = tuned.tuned.limits.max_num_batched_tokens
    assert f"with --max-num-batched-tokens {num}" in describe_plan(figures)
    assert "with the flags as given: 2 replicas" in describe_plan(figures)
    command = figures["recommended"]["command"]
    assert command == (
        "everystop serve --policy shortest --no-enable-prefix-caching --block-size 16 --max-num-seqs 4 "
        f"--max-num-batched-tokens {num}"
    )
    assert as_yaml(figures).endswith(
        "replicas: 1\nrouter: round-robin\nserve:\n"
        '  policy: "shortest"\n  enable_prefix_caching: false\n  block_size: 16\n'
        f"  max_num_seqs: 4\n  max_num_batched_tokens: {num}\n"
    )
    assert f"\nmax-num-batched-tokens = {num}\n" in as_toml(figures)


def test_flags_that_gain_little_are_left_as_they_are() -> None:
    """One token each way: no flag changes a step."""
    plan = plan_of(poisson(), setup_of(64), rate=20, is_searching=True)
    assert plan.tuned.limits == plan.setup.limits
    assert "with --max" not in describe_plan(figures_of(plan))


def test_rate_that_nothing_carries_is_said_with_the_nearest() -> None:
    asked: dict[str, Any] = {"replicas": (1, 2), "rate": 190, "target": Target(ttft_p95_ms=12, itl_p95_ms=50)}
    figures = figures_of(plan_of(poisson(), setup_of(1), **asked))
    assert not figures["answer"]["is_met"]
    assert figures["recommended"] is None
    first, second, third = figures["answer"]["sentences"]
    assert first == (
        "No number of replicas that was tried, up to 2, carries 190 requests/s within TTFT p95 12 ms and ITL p95 50 ms."
    )
    assert second.startswith("The nearest: 2 replicas, TTFT p95 ")
    assert third == "Allow more --replicas, lower --rate, or raise the target."


def test_overload_of_all_replicas_names_what_they_can_serve() -> None:
    figures = figures_of(plan_of(poisson(), setup_of(1), replicas=(1, 2), rate=900, is_searching=True))
    assert figures["answer"]["best"] is None
    assert figures["answer"]["sentences"][1].startswith("2 replicas serve at most 200 requests/s; ")


def test_target_below_a_lone_request_is_unreachable() -> None:
    """A token takes 10 ms even on an idle replica."""
    target = Target(ttft_p95_ms=500, itl_p95_ms=5)
    figures = figures_of(plan_of(poisson(num_output=4), setup_of(4), replicas=(1, 2), rate=20, target=target))
    assert [carried["highest_rate"] for carried in figures["replicas"]] == [0, 0]
    assert [carried["next_misses"] for carried in figures["replicas"]] == [["itl"], ["itl"]]
    last = figures["answer"]["sentences"][-1]
    assert last.startswith("Nor would more replicas: at ")
    assert "ITL p95 10 ms (target 5 ms)" in last


def test_refused_requests_are_told() -> None:
    requests = [traced(100 * i, 5000 if i % 10 == 0 else 10, 2) for i in range(NUM)]
    plan = plan_of(Traffic(requests), setup_of(4), rate=10)
    assert "up to 20 requests of a point are longer than 4,096 tokens and were refused" in describe_plan(
        figures_of(plan)
    )


def test_trace_that_is_refused_whole_has_no_plan() -> None:
    with pytest.raises(ConfigError, match=r"the longest has 5,002 tokens, and a sequence may have 4,096"):
        plan_of(Traffic([traced(100 * i, 5000, 2) for i in range(50)]), setup_of(4))


def test_same_inputs_give_the_same_bytes_with_any_number_of_jobs() -> None:
    asked: dict[str, Any] = {"replicas": (1, 2), "rate": 60, "is_searching": True, "num_requests": 40}
    asked["target"] = Target(ttft_p95_ms=40, itl_p95_ms=20)
    once, again, together = (
        json.dumps(figures_of(plan_of(poisson(60, num_output=3), setup_of(2), jobs, **asked))) for jobs in (1, 1, 2)
    )
    assert once == again == together


def test_rates_are_round_and_reach_from_half_a_cliff_to_the_last() -> None:
    rates = default_rates([7.1234, 30.0], 12.0)
    assert rates[0] == 3.562
    assert rates[-1] == 30
    assert all(rate == short(rate) for rate in rates)
    assert all(abs(math.log(rate / 12)) > 0.1 for rate in rates), "the wanted rate takes the place of its neighbour"
    assert [short(rate) for rate in (12.3456, 0.0123456, 98765.4, 10.0)] == [12.35, 0.01235, 98770.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": ()}, "--replicas must name whole numbers from 1"),
        ({"replicas": (0, 1)}, "--replicas must name whole numbers from 1"),
        ({"rate": 0}, "a rate of 0 requests a second cannot be simulated"),
        ({"rates": [1, -2]}, "a rate of -2 requests a second"),
        ({"num_requests": 19}, "--requests is 19; percentiles need at least 20"),
    ],
)
def test_question_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Question(**({"target": WIDE, "replicas": (1,)} | changes))
