"""The router that is fair across replicas: service in proportion to weights, a quiet tenant unharmed, nobody lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from heapq import merge
from random import Random
from typing import Any

import pytest
from tests.sim.test_simulator import LINE, MS, make_setup, random_trace, run, traced

from everystop.core.errors import ConfigError
from everystop.core.events import FinishEvent, StepEvent
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan
from everystop.core.policy import PolicySettings, Share
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.core.rows import Row
from everystop.sim.fair_router import FairRouter
from everystop.sim.routing import AtOnce, RoundRobin
from everystop.sim.simulator import Simulation
from everystop.sim.tally import Tally
from everystop.sim.traces import TraceRequest

SECONDS = 30
NUM_REPLICAS = 4


def poisson(tenant: str, per_s: float, seed: int) -> Iterator[TraceRequest]:
    """Prompts of 20 to 59 and answers of 40 to 79 tokens, at a mean rate, for half a minute."""
    dice = Random(seed)
    at_s = dice.expovariate(per_s)
    while at_s < SECONDS:
        yield traced(at_s * 1e3, dice.randint(20, 59), dice.randint(40, 79), tenant=tenant)
        at_s += dice.expovariate(per_s)


def serve(*streams: Iterator[TraceRequest], **changes: Any) -> Tally:
    """Four replicas of 4 slots whose steps take 20 ms: 800 output tokens a second in all. The tally's service is what
    came in the seconds from 5, when lines have formed, to 30.
    """
    setup = make_setup(max_num_seqs=4, num_blocks=100, cost=LINE_20, num_replicas=NUM_REPLICAS, check=False, **changes)
    simulation = Simulation(setup)
    tenants, seen = simulation.tally.tenants, []

    def arrivals() -> Iterator[TraceRequest]:
        for one in merge(*streams, [traced(SECONDS * 1e3, 1, 1, tenant="last")], key=lambda one: one.arrival_ns):
            if one.arrival_ns >= (0.0, 5.0, SECONDS)[len(seen)] * 1e9:
                seen.append({name: totals.service for name, totals in tenants.items()})
            yield one

    simulation.run(arrivals())
    for name, service in seen[2].items():
        tenants[name].service = service - seen[1][name]
    return simulation.tally


LINE_20 = type(LINE)(step_ns=20 * MS)


@pytest.mark.parametrize("policy", ["continuous", "fair"])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_two_floods_over_four_replicas_are_served_by_their_weights(weight: float, policy: str) -> None:
    """Both ask for more than all replicas can do, the first for twice as much as the second."""
    streams = lambda: (poisson("a", 30, 1), poisson("b", 15, 2))  # noqa: E731
    settings = PolicySettings(shares={"b": Share(weight)})
    fair = serve(*streams(), router="fair", policy=policy, policy_settings=settings).tenants
    assert fair["a"].service > 10_000 / weight
    assert fair["b"].service / fair["a"].service == pytest.approx(weight, rel=0.05)
    least = serve(*streams(), router="least-loaded").tenants
    assert least["b"].service / least["a"].service == pytest.approx(0.5, rel=0.15)
    assert fair["a"].service + fair["b"].service >= 0.97 * (least["a"].service + least["b"].service)


def test_quiet_tenant_hardly_feels_a_flood_over_four_replicas() -> None:
    """It asks for a fifth of the capacity, the flood for ten times as much."""
    quiet, flood = (lambda: poisson("quiet", 2.2, 3)), (lambda: poisson("flood", 22, 4))

    def p95(tally: Tally) -> int:
        return tally.tenants["quiet"].ttft.percentiles_ns([95])[0]

    alone = p95(serve(quiet(), router="fair"))
    fair = p95(serve(quiet(), flood(), router="fair"))
    first_come = p95(serve(quiet(), flood(), router="least-loaded"))
    assert fair * 5 < first_come
    assert fair < 8 * alone


def test_replica_by_replica_fairness_is_not_enough_where_tenants_sit_apart() -> None:
    """With the prefixes of one tenant on one replica, fair replicas behind `prefix-affinity` leave service unequal."""

    def apart() -> Iterator[TraceRequest]:
        for i in range(1_200):
            tenant = "abc"[i % 3]
            yield traced(5 * i, 64, 20, tenant=tenant, prefix_ids=("abc".index(tenant),), prefix_id_tokens=64)

    def spread(router: str) -> float:
        results = run(apart(), cost=LINE_20, max_num_seqs=4, num_replicas=2, router=router, policy="fair", check=False)
        index: float = results["fairness_index"]["mean"]
        return index

    assert spread("fair") > 0.98
    assert spread("prefix-affinity") < spread("fair")


def make_router(**shares: Share) -> FairRouter:
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=32)
    return FairRouter(limits=limits, block_size=16, shares=shares)


class Place:
    """A replica with these keys in its prefix cache."""

    def __init__(self, *keys: bytes) -> None:
        self._keys = keys

    def num_present(self, now_ns: int) -> int:
        raise AssertionError("it knows whom it has sent")

    def num_matched(self, keys: Any) -> int:
        return sum(1 for key in keys if key in self._keys)


class Desk:
    """A router over places, with requests numbered as they come; notes who was sent where."""

    def __init__(self, router: FairRouter, *places: Place) -> None:
        self.router = router
        self._places = places
        self._num = 0

    def take(self, tenant: str, num_prompt: int = 10, keys: tuple[bytes, ...] = ()) -> list[tuple[int, int]]:
        request = Request(
            self._num, [0] * num_prompt, SamplingParams(max_tokens=5), tenant=tenant, block_keys=list(keys)
        )
        self._num += 1
        return [(index, r.request_id) for index, r in self.router.take(request, self._places, 0)]

    def token(self, index: int, *request_ids: int, ended: tuple[int, ...] = ()) -> list[tuple[int, int]]:
        """A step of the replica brings a token each, and these end."""
        plan = StepPlan(0, rows=[Row(i, 0, 1, 0, 0) for i in request_ids])
        step = StepEvent(0, 0, 0, plan, tuple((0,) for _ in request_ids), 0, 0, 0, 0, 0, 0, 0, 0, 0)
        ends = [FinishEvent.of(Request(i, [0] * 10, SamplingParams()), 0, 0, 0, FinishReason.LENGTH, "") for i in ended]
        return [(index, r.request_id) for index, r in self.router.hear(index, [*ends, step], self._places, 0)]


def test_requests_are_kept_until_a_place_is_free_and_the_least_served_goes_first() -> None:
    desk = Desk(make_router(), Place(), Place())
    assert [desk.take("a") for _ in range(5)] == [[(0, 0)], [(1, 1)], [(0, 2)], [(1, 3)], []]
    assert desk.take("b") == []
    assert list(desk.router.waiting_tenants()) == ["a", "b"]
    assert desk.token(1, 1, 3) == []
    assert desk.token(1, 1, ended=(1,)) == [(1, 5)], "b has been served nothing"
    assert desk.token(0, 0, ended=(0,)) == [(0, 4)]


def test_replica_with_two_steps_of_prompts_before_it_has_no_place() -> None:
    desk = Desk(make_router(), Place())
    assert desk.take("a", num_prompt=64) == [(0, 0)]
    assert desk.take("a", num_prompt=4) == []
    assert desk.token(0, 0) == [(0, 1)]


def test_cached_prefix_chooses_the_place_and_costs_nothing() -> None:
    desk = Desk(make_router(), Place(), Place(b"x", b"y"))
    assert desk.take("a", num_prompt=40, keys=(b"x", b"y")) == [(1, 0)]
    assert desk.take("a", num_prompt=40, keys=(b"x", b"z")) == [(1, 1)]
    desk.take("b", num_prompt=30)
    desk.take("b", num_prompt=30)
    assert desk.take("a") == desk.take("b") == []
    assert desk.token(0, 2, 3, ended=(2,)) == [(0, 4)], "a was charged 8 and 24 tokens, b 60"


def test_limit_on_running_requests_holds_over_all_replicas() -> None:
    desk = Desk(make_router(a=Share(max_running=1)), Place(), Place())
    assert desk.take("a") == [(0, 0)]
    assert desk.take("a") == []
    assert desk.take("b") == [(1, 2)]
    assert desk.token(0, 0, ended=(0,)) == [(0, 1)]


@pytest.mark.parametrize("share", [Share(max_queued=3), Share(token_rate=5.0), Share(kv_share=0.5)])
def test_limits_that_only_a_replica_could_keep_are_refused(share: Share) -> None:
    """A request kept back by its replica would hold a place there, for its tenant's sake, that others could use."""
    with pytest.raises(ConfigError, match=r"not (max_queued|token_rate|kv_share), which the tenant 'a' has"):
        make_router(a=share)


def test_idle_tenant_saves_nothing_up() -> None:
    """While b is away a is served much; when b comes back it has no more than the next turn ahead of it."""
    desk = Desk(make_router(), Place())
    desk.take("b")
    desk.token(0, 0, ended=(0,))
    for i in range(1, 40):
        assert desk.take("a") == [(0, i)]
        desk.token(0, i, ended=(i,))
    assert [desk.take("a"), desk.take("a")] == [[(0, 40)], [(0, 41)]]
    assert [desk.take(tenant) for tenant in "abba"] == [[], [], [], []]
    boarded = [desk.token(0, i, ended=(i,))[0][1] for i in (40, 41, 42)]
    assert boarded == [43, 42, 44], "they take turns"


def test_refused_request_frees_its_place_and_costs_nothing() -> None:
    trace = [traced(0, 5_000, 4, tenant="a"), traced(0, 10, 2, tenant="a"), traced(1, 5_000, 4)]
    results = run(trace, num_replicas=2, router="fair")
    assert (results["num_refused"], results["num_finished"]) == (2, 1)


def test_time_at_the_router_counts() -> None:
    """One slot, steps of 1 ms: the second is sent when the first ends at 3 ms, and has its token at 4 ms."""
    results = run([traced(0, 4, 3), traced(0.5, 4, 1)], router="fair", max_num_seqs=1)
    assert results["ttft_ms"]["max"] == 3.5
    assert results["e2e_ms"]["max"] == 3.5


@pytest.mark.parametrize("policy", ["continuous", "static", "priority", "fair"])
def test_nobody_is_lost_also_where_blocks_are_short(policy: str) -> None:
    trace: Callable[[], Iterator[TraceRequest]] = lambda: random_trace(300, gap_ms=0.3, num_ids=5)  # noqa: E731
    settings = PolicySettings(batch_wait_ns=4 * MS)
    runs = [
        run(trace(), policy=policy, policy_settings=settings, num_replicas=3, num_blocks=14, router="fair", cost=LINE)
        for _ in range(2)
    ]
    assert runs[0]["num_finished"] == sum(replica["num_requests"] for replica in runs[0]["replicas"]) == 300
    assert json.dumps(runs[0]) == json.dumps(runs[1])


class LateRoundRobin(AtOnce):
    """Sends at once, but has the simulator tell it of every step."""

    is_late = True

    def __init__(self) -> None:
        super().__init__(RoundRobin())
        self.heard: list[tuple[int, int]] = []

    def hear(self, index: int, events: Any, stations: Any, now_ns: int) -> tuple[()]:
        self.heard += [(now_ns, event.now_ns) for event in events if isinstance(event, StepEvent)]
        return ()


def test_replicas_do_the_same_whether_the_router_hears_of_steps_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it hears of each when it ends, in the order of time."""
    changes: dict[str, Any] = {"num_replicas": 3, "cost": LINE, "policy": "static", "num_blocks": 30}
    trace = list(random_trace(300, gap_ms=0.5, num_ids=5))
    expected = run(trace, **changes)
    router = LateRoundRobin()
    monkeypatch.setattr("everystop.sim.simulator.make_router", lambda *_, **__: router)
    assert run(trace, **changes) == expected
    assert len(router.heard) >= expected["num_steps"] > 100
    assert router.heard == sorted(router.heard)
    assert all(now_ns == ended_ns for now_ns, ended_ns in router.heard)
