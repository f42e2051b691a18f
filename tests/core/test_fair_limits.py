"""Limits of a tenant: what it may queue, use in a second and hold of the cache; and that nothing else is held back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.durations import NS_PER_S
from everystop.core.errors import RequestError, TenantQueueFull, TooManyChoices
from everystop.core.events import AdmitEvent, Event, PreemptEvent, RefuseEvent, StepEvent, WaitEvent, WaitReason
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import Fair, FairPrefix, Policy, Share
from everystop.core.policy.rate import BURST_NS, RateLimit
from everystop.core.request import Request
from everystop.core.scheduler import Scheduler

FAIR: list[type[Fair]] = [Fair, FairPrefix]
MS = 1_000_000


def make_harness(policy: Policy, **settings: object) -> Harness:
    settings = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 4, **settings}
    return Harness(make_scheduler(policy=policy, **settings))  # type: ignore[arg-type]


def add(harness: Harness, tenant: str, num: int = 1, *, num_prompt: int = 4, num_output: int = 8) -> None:
    for _ in range(num):
        harness.add(make_request(len(harness.requests), num_prompt, max_tokens=num_output, tenant=tenant))


def running(harness: Harness) -> Counter[str]:
    return Counter(request.tenant for request in harness.scheduler.running.values())


# ---------------------------------------------------------------- max_queued


@pytest.mark.parametrize("kind", FAIR)
def test_request_beyond_the_queue_is_refused_by_name_and_forgotten(kind: type[Fair]) -> None:
    policy = kind({"a": Share(max_running=1, max_queued=2)})
    harness = make_harness(policy)
    add(harness, "a", 3)
    with pytest.raises(TenantQueueFull, match=r"waiting requests: 3; .* 2 \(max_queued\).* try again in 1 s") as caught:
        add(harness, "a")
    assert caught.value.retry_after_s == 1
    assert [e for e in harness.events if isinstance(e, RefuseEvent)] == [RefuseEvent(0, 3, "TenantQueueFull", "a")]
    add(harness, "b", 20)
    harness.run()
    assert harness.refused == {3}
    assert policy._accounts["a"].is_idle
    assert not policy._boarded


@pytest.mark.parametrize("kind", FAIR)
def test_unknown_tenant_that_is_refused_leaves_no_account(kind: type[Fair]) -> None:
    policy = kind({"a": Share(max_queued=0, max_running=1)})
    harness = make_harness(policy)
    with pytest.raises(TooManyChoices):
        harness.add_group(0, 4, 2, tenant="a")
    assert len(policy._accounts) == 0


def test_those_who_have_a_place_to_run_do_not_count_as_queued() -> None:
    """Four slots of which b's two waiting requests will take two; what comes before the first step is no queue."""
    harness = make_harness(Fair({"a": Share(max_queued=0)}))
    add(harness, "b", 2)
    add(harness, "a", 2)
    with pytest.raises(TenantQueueFull):
        add(harness, "a")
    harness.turn()
    assert running(harness) == {"a": 2, "b": 2}
    harness.run()
    add(harness, "a", 4)
    harness.run()


def test_others_who_are_held_back_take_no_place_away() -> None:
    harness = make_harness(Fair({"a": Share(max_queued=0), "b": Share(max_running=1)}))
    add(harness, "b", 30)
    harness.turn()
    add(harness, "a", 3)
    harness.turn()
    assert running(harness) == {"a": 3, "b": 1}
    harness.run()


@pytest.mark.parametrize("kind", FAIR)
def test_each_choice_counts_and_all_or_none_are_taken(kind: type[Fair]) -> None:
    harness = make_harness(kind({"a": Share(max_running=1, max_queued=3)}))
    harness.add_group(0, 4, 3, tenant="a", max_tokens=9)
    for k in range(2):  # whichever of its choices is asked for
        with pytest.raises(TenantQueueFull, match=r"with 2 more"):
            harness.add(make_request(3 + k, 4, n=2, group_id=3, choice_index=k, tenant="a"))
    harness.add(make_request(5, 4, max_tokens=9, tenant="a"))
    for _ in range(3):
        harness.turn()  # 0 runs; its siblings are parked behind it or wait: they are still in the queue
    with pytest.raises(TenantQueueFull, match="waiting requests: 3;"):
        harness.add(make_request(6, 4, tenant="a"))
    with pytest.raises(TooManyChoices, match=r"n is 5, .* at most 4"):
        harness.add(make_request(7, 4, n=5, group_id=7, tenant="a"))
    harness.run()
    assert sorted(harness.finished) == [0, 1, 2, 5]


def test_retry_after_is_the_time_between_boardings_or_until_all_is_paid_for() -> None:
    policy = Fair({"a": Share(max_running=1, max_queued=1)})
    harness = make_harness(policy)
    add(harness, "a", 2)
    harness.turn()
    harness.now_ns += 1500 * MS
    while 0 not in harness.finished:
        harness.turn()
    add(harness, "a")
    harness.turn()  # the second has boarded, 1.5 s after the first
    with pytest.raises(TenantQueueFull) as caught:
        add(harness, "a")
    assert caught.value.retry_after_s == 2
    harness.run()
    add(harness, "a", 2)
    harness.turn()
    harness.now_ns += 7000 * MS
    with pytest.raises(TenantQueueFull) as caught:
        add(harness, "a")
    assert caught.value.retry_after_s == 8, "7.001 s so far, longer than any before"
    harness.run()
    harness = make_harness(Fair({"a": Share(max_queued=1, token_rate=10)}))
    add(harness, "a", num_prompt=50, num_output=1)  # 52 tokens, of which 10 were saved up
    harness.turn()
    add(harness, "a")
    with pytest.raises(TenantQueueFull) as caught:
        add(harness, "a")
    assert caught.value.retry_after_s == 5
    harness.run()


def test_tenant_that_has_paid_since_the_last_step_has_its_places_again() -> None:
    harness = make_harness(Fair({"a": Share(max_queued=1, token_rate=10)}))
    add(harness, "a", num_prompt=18, num_output=1)  # 20 tokens, of which 10 were saved up
    harness.run()
    add(harness, "a")
    assert harness.loop.turn().wake_at_ns is not None
    with pytest.raises(TenantQueueFull):
        add(harness, "a")
    harness.now_ns += NS_PER_S
    add(harness, "a", 3)
    harness.run()
    assert len(harness.finished) == 5


def test_server_without_max_queued_refuses_nobody() -> None:
    harness = make_harness(Fair({"a": Share(max_running=1)}))
    add(harness, "a", 500)
    assert not harness.refused


# ---------------------------------------------------------------- token_rate


class SlowBucket:
    """A token bucket by the book: a level that rises with time up to one second's worth, and falls with spending."""

    def __init__(self, per_s: float) -> None:
        self.per_s = Fraction(per_s)
        self.level = self.per_s * BURST_NS / NS_PER_S
        self.now_ns = 0

    def level_at(self, now_ns: int) -> Fraction:
        full = self.per_s * BURST_NS / NS_PER_S
        return min(full, self.level + self.per_s * (now_ns - self.now_ns) / NS_PER_S)

    def spend(self, cost: int, now_ns: int) -> None:
        self.level, self.now_ns = self.level_at(now_ns) - cost, now_ns


@pytest.mark.parametrize("per_s", [0.001, 3, 250.5, 1_000_000, 1e9])
def test_rate_limit_is_a_token_bucket(per_s: float) -> None:
    rng = random.Random(str(per_s))
    fast, slow, now_ns = RateLimit(per_s), SlowBucket(per_s), 0
    for _ in range(300):
        now_ns += rng.randrange(3 * NS_PER_S) if rng.random() < 0.3 else rng.randrange(1000)
        cost = rng.randint(0, max(3, int(per_s)))
        fast.spend(cost, now_ns)
        slow.spend(cost, now_ns)
        due_ns = now_ns + -slow.level * NS_PER_S / slow.per_s
        assert abs(fast.paid_ns - due_ns) <= 1 + abs(due_ns - now_ns) / 100_000


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", FAIR)
def test_tenant_gets_its_rate_and_no_more_and_the_others_all_the_rest(kind: type[Fair], depth: int) -> None:
    policy = kind({"a": Share(token_rate=500)})
    scheduler = make_scheduler(policy=policy, num_blocks=400, block_size=4, max_num_seqs=4)
    harness = Harness(scheduler, depth=depth, is_checking=False)
    for _ in range(300):
        add(harness, "a")
        add(harness, "b")
    while "b" in {r.tenant for r in harness.scheduler.requests.values()}:
        turn = harness.turn()
        if depth == 0 and "b" in waiting_tenants(harness):
            assert turn.plan is not None
            assert len(turn.plan.rows) == 4, "b takes what a may not"
    seconds = harness.now_ns / NS_PER_S
    served = Counter[str]()
    for request in harness.requests.values():
        if request.state == "finished":
            served[request.tenant] += 4 + 2 * len(harness.received[request.request_id])
    assert served["a"] <= 500 * (seconds + 1) + 4 * (4 + 2 * 8)
    assert served["a"] >= 500 * seconds - 4 * (4 + 2 * 8)
    assert served["b"] == 300 * (4 + 2 * 8)


def waiting_tenants(harness: Harness) -> set[str]:
    scheduler = harness.scheduler
    return {r.tenant for i, r in scheduler.requests.items() if i not in scheduler.running}


@pytest.mark.parametrize("kind", FAIR)
def test_when_all_who_wait_are_over_their_rates_the_plan_says_when_the_first_has_paid(kind: type[Fair]) -> None:
    harness = make_harness(kind({"a": Share(token_rate=100), "b": Share(token_rate=200)}))
    add(harness, "a", num_prompt=198, num_output=1)  # 200 tokens, 100 of them saved up: paid for after 1 s
    add(harness, "b", num_prompt=298, num_output=1)  # 300 tokens, 200 of them saved up: 0.5 s
    harness.run()
    add(harness, "a")
    add(harness, "b")
    turn = harness.turn()
    assert turn.is_idle
    boarded_b, boarded_a = (
        next(e.now_ns for e in harness.events if isinstance(e, AdmitEvent) and e.request_id == i) for i in (1, 0)
    )
    assert turn.wake_at_ns is not None
    assert abs(turn.wake_at_ns - (boarded_b + NS_PER_S // 2)) < 10 * MS
    reasons = [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == -1]
    assert reasons[-1] is WaitReason.TENANT_LIMIT
    harness.run()
    admits = {e.request_id: e.now_ns for e in harness.events if isinstance(e, AdmitEvent)}
    assert admits[3] == turn.wake_at_ns
    assert 0 <= admits[2] - (boarded_a + NS_PER_S) < 10 * MS


def test_while_something_runs_the_tenant_boards_in_the_first_step_after_it_has_paid() -> None:
    harness = make_harness(Fair({"a": Share(token_rate=1000)}))
    add(harness, "b", num_output=400)
    add(harness, "a", num_prompt=1098, num_output=1)  # 1,100 tokens, 1,000 saved up
    add(harness, "a")
    harness.run()
    admits = {e.request_id: e.now_ns for e in harness.events if isinstance(e, AdmitEvent)}
    first_tokens = next(e.now_ns for e in harness.events if isinstance(e, StepEvent) and e.tokens[-1:] and e.plan.rows)
    assert first_tokens < admits[2] < harness.finished[0].now_ns
    assert 100 * MS <= admits[2] <= 103 * MS


def test_cached_tokens_do_not_count_against_the_rate() -> None:
    harness = make_harness(Fair({"a": Share(token_rate=100)}))
    prompt = list(range(200))
    harness.add(make_request(0, prompt, max_tokens=1, tenant="b"))
    harness.run()
    for i in range(1, 5):
        harness.add(make_request(i, prompt, max_tokens=1, tenant="a"))
    start_ns = harness.now_ns
    harness.run()
    assert harness.now_ns - start_ns < 20 * MS


def test_debt_outlives_the_requests_and_the_crowd() -> None:
    """A tenant's account stays open while it owes, however many others come and go."""
    policy = Fair({"a": Share(token_rate=1)})
    harness = make_harness(policy)
    add(harness, "a", num_prompt=300, num_output=1)
    harness.run()
    for i in range(300):
        add(harness, f"tenant {i}", num_prompt=2, num_output=1)
        harness.turn()
    harness.run()
    assert len(policy._accounts) < 300
    add(harness, "a")
    assert harness.turn().wake_at_ns is not None
    harness.run()


# ------------------------------------------------------------------ kv_share


@pytest.mark.parametrize("kind", FAIR)
def test_tenant_boards_nobody_who_would_pass_its_share_of_the_cache(kind: type[Fair]) -> None:
    """A request takes 3 blocks at boarding and none later; a quarter of 40 blocks holds three of them."""
    harness = make_harness(kind({"a": Share(kv_share=0.25)}), num_blocks=40, max_num_seqs=12)
    add(harness, "a", 12, num_prompt=8, num_output=4)
    add(harness, "b", 3, num_prompt=8, num_output=4)
    harness.turn()
    assert running(harness) == {"a": 3, "b": 3}
    reasons = [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == -1]
    assert reasons[-1] is WaitReason.TENANT_LIMIT
    while harness.scheduler.requests:
        harness.turn()
        held = sum(len(r.block_table) for r in harness.scheduler.running.values() if r.tenant == "a")
        assert held <= 10
    harness.run()


@pytest.mark.parametrize("kind", FAIR)
def test_tenant_that_runs_nothing_may_always_board_one(kind: type[Fair]) -> None:
    harness = make_harness(kind({"a": Share(kv_share=0.01)}), num_blocks=40)
    add(harness, "a", 3, num_prompt=60, num_output=12)
    while harness.scheduler.requests:
        harness.turn()
        assert running(harness)["a"] <= 1
    assert len(harness.finished) == 3


@pytest.mark.parametrize("kind", FAIR)
def test_running_requests_may_grow_past_the_share_and_keep_the_next_one_out(kind: type[Fair]) -> None:
    harness = make_harness(kind({"a": Share(kv_share=0.25)}), num_blocks=40)
    add(harness, "a", 3, num_prompt=4, num_output=40)  # 2 blocks each at first, 11 in the end
    harness.turn()
    assert running(harness)["a"] == 3
    for _ in range(25):
        harness.turn()
    assert sum(len(r.block_table) for r in harness.scheduler.running.values()) > 10
    assert harness.scheduler.policy._accounts["a"].num_blocks > 10  # type: ignore[attr-defined]
    add(harness, "a")
    harness.turn()
    assert running(harness)["a"] == 3
    harness.run()


# ----------------------------------------------------------- work-conserving


class Watch:
    """Follows events, and knows by the slow way who may not board."""

    def __init__(self, shares: dict[str, Share], scheduler: Scheduler) -> None:
        self.shares = shares
        self.scheduler = scheduler
        self.buckets = {name: SlowBucket(share.token_rate) for name, share in shares.items() if share.token_rate}
        self.requests: dict[int, Request] = {}
        self.boarded: set[int] = set()

    def note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AdmitEvent) and event.request_id not in self.boarded:
                self.boarded.add(event.request_id)
                num_prompt = self.requests[event.request_id].num_prompt_tokens
                self._spend(event.request_id, num_prompt, event.now_ns)
            elif isinstance(event, StepEvent):
                for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                    self._spend(row.request_id, 2 * len(tokens), event.now_ns)

    def _spend(self, request_id: int, cost: int, now_ns: int) -> None:
        bucket = self.buckets.get(self.requests[request_id].tenant)
        if bucket is not None:
            bucket.spend(cost, now_ns)

    def is_held_back(self, request: Request, now_ns: int) -> bool:
        """Its tenant is at one of its limits."""
        share = self.shares.get(request.tenant, Share())
        own = [r for r in self.scheduler.running.values() if r.tenant == request.tenant]
        if share.max_running is not None and len(own) >= share.max_running:
            return True
        kv = self.scheduler.kv
        held = sum(len(r.block_table) for r in own) + kv.num_blocks_for(request.num_tokens + 1)
        if share.kv_share is not None and own and held > share.kv_share * kv.pool.num_blocks:
            return True
        bucket = self.buckets.get(request.tenant)
        return bucket is not None and bucket.level_at(now_ns) < 0


def first_waiting(scheduler: Scheduler) -> Iterator[Request]:
    """Of each tenant the one that came first, or came back."""
    seen: set[str] = set()
    waiting = [r for i, r in scheduler.requests.items() if i not in scheduler.running]
    for request in sorted(waiting, key=lambda r: (r.num_preemptions == 0, r.request_id)):
        if request.tenant not in seen:
            seen.add(request.tenant)
            yield request


@pytest.mark.parametrize("kind", FAIR)
def test_no_slot_is_free_while_anybody_may_take_it_and_nobody_takes_what_he_may_not(kind: type[Fair]) -> None:
    shares = {
        "rate": Share(token_rate=300),
        "slow": Share(0.5, token_rate=40),
        "few": Share(2.0, max_running=2),
        "small": Share(kv_share=0.05),
    }
    num_free_and_waiting = num_full = 0
    for seed in range(3):
        rng = random.Random(seed)
        scheduler = make_scheduler(
            policy=kind(shares), num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=512,
            prefix_caching=False,
        )  # fmt: skip
        watch, now_ns, request_id = Watch(shares, scheduler), 0, 0
        for _ in range(400):
            while rng.random() < 0.4:
                tenant = rng.choice(["rate", "slow", "few", "small", "free"])
                request = make_request(
                    request_id, rng.randint(1, 30), max_tokens=rng.randint(1, 30), tenant=tenant, arrival_ns=now_ns
                )
                watch.requests[request_id] = request
                scheduler.add(request, now_ns)
                request_id += 1
            may_board = {r.tenant for r in first_waiting(scheduler) if not watch.is_held_back(r, now_ns)}
            plan = scheduler.schedule(now_ns)
            admitted = {watch.requests[a.request_id].tenant for a in plan.admitted}
            assert not admitted - may_board, "somebody took what he may not"
            watch.note(scheduler.take_events())
            if len(scheduler.running) < 8 and not plan.preempted:  # who displaced somebody boards in the next step
                idle = [r for r in first_waiting(scheduler) if not watch.is_held_back(r, now_ns)]
                assert not idle, "a slot is free, and somebody may take it"
                num_free_and_waiting += scheduler.num_waiting > 0
            else:
                num_full += 1
            if plan.is_noop:
                now_ns = max(now_ns + MS, min(plan.wake_at_ns or 0, now_ns + 20 * MS))
            else:
                now_ns += 3 * MS
                watch.note(scheduler.update(plan, result_of(plan), now_ns))
            scheduler.check_integrity()
    assert min(num_free_and_waiting, num_full) > 100


def result_of(plan: StepPlan) -> StepResult:
    return StepResult([(0,) if row.logits_from < row.num_tokens else () for row in plan.rows])


def test_preemption_does_not_confuse_what_a_tenant_holds() -> None:
    policy = Fair({"a": Share(kv_share=0.9), "b": Share(kv_share=0.5)})
    harness = make_harness(policy, num_blocks=12, prefix_caching=False)
    for i in range(12):
        harness.add(make_request(i, 8, max_tokens=20, tenant="ab"[i % 2]))
    while harness.scheduler.requests:
        harness.turn()
        for tenant in "ab":
            held = sum(len(r.block_table) for r in harness.scheduler.running.values() if r.tenant == tenant)
            assert abs(policy._accounts[tenant].num_blocks - held) <= 4, "what grows in a step is seen at its end"
    assert any(isinstance(e, PreemptEvent) for e in harness.events)
    assert all(policy._accounts[tenant].num_blocks == 0 for tenant in "ab")


def test_random_limits_never_stop_the_server() -> None:
    """Whatever the limits are, everything that is taken ends."""
    for seed in range(25):
        rng = random.Random(seed)
        shares = {
            tenant: Share(
                rng.choice([0.5, 1.0, 3.0]),
                rng.choice([None, 1, 2]),
                rng.choice([None, 0, 3]),
                rng.choice([None, 5.0, 400.0]),
                rng.choice([None, 0.001, 0.3]),
            )
            for tenant in "abc"
        }
        harness = Harness(
            make_scheduler(policy=rng.choice(FAIR)(shares), num_blocks=20, block_size=4, max_num_seqs=3),
            depth=seed % 2,
        )
        for i in range(30):
            try:
                harness.add(
                    make_request(i, rng.randint(1, 20), max_tokens=rng.randint(1, 20), tenant=rng.choice("abcd"))
                )
            except RequestError:
                assert i in harness.refused
            if rng.random() < 0.5:
                harness.turn()
        harness.run(max_turns=5_000)
