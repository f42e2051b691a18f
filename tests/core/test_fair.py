"""The virtual token counter: who boards next, what a request costs, and why one waits."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, WaitEvent, WaitReason
from everystop.core.policy import Fair, Share

PROMPT, OUTPUT = 4, 3


def make_harness(shares: dict[str, Share] | None = None, *, num_slots: int = 1, **settings: object) -> Harness:
    policy = Fair(shares)
    return Harness(make_scheduler(policy=policy, max_num_seqs=num_slots, num_blocks=200, **settings))  # type: ignore[arg-type]


def add(harness: Harness, tenant: str, num: int = 1, num_prompt: int = PROMPT, num_output: int = OUTPUT) -> None:
    for _ in range(num):
        request_id = len(harness.requests)
        harness.add(make_request(request_id, num_prompt, max_tokens=num_output, tenant=tenant))


def boarded(harness: Harness) -> str:
    """The tenants in the order in which their requests first boarded."""
    admits = [event for event in harness.events if isinstance(event, AdmitEvent) and not event.resumed]
    return "".join(harness.requests[event.request_id].tenant for event in admits)


def reasons(harness: Harness, request_id: int) -> list[WaitReason]:
    return [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == request_id]


def test_tenants_take_turns_though_one_came_first_with_many() -> None:
    harness = make_harness()
    add(harness, "a", 6)
    add(harness, "b", 3)
    harness.run()
    assert boarded(harness) == "ababab" + "aaa"


def test_requests_of_one_tenant_board_in_order_of_arrival() -> None:
    harness = make_harness()
    add(harness, "a", 5)
    harness.run()
    assert [e.request_id for e in harness.events if isinstance(e, AdmitEvent)] == [0, 1, 2, 3, 4]


def test_weights_divide_the_service() -> None:
    harness = make_harness({"b": Share(3.0)})
    add(harness, "a", 40)
    add(harness, "b", 40)
    harness.run()
    assert boarded(harness)[:40].count("b") in (29, 30, 31)


def test_output_costs_twice_as_much_as_input() -> None:
    """Tenant a sends 20 prompt tokens for 1, tenant b 1 for 10: 22 against 21 a request."""
    harness = make_harness()
    for _ in range(20):
        add(harness, "a", num_prompt=20, num_output=1)
        add(harness, "b", num_prompt=1, num_output=10)
    harness.run()
    first = boarded(harness)[:20]
    assert abs(first.count("a") - first.count("b")) <= 2


def test_idleness_saves_nothing_up() -> None:
    """b has had nothing while a was served for long; when it comes, they take turns from then on."""
    harness = make_harness()
    add(harness, "a", 20)
    for _ in range(40):
        harness.turn()
    before = len(boarded(harness))
    assert before >= 8
    add(harness, "b", 5)
    harness.run()
    assert boarded(harness)[before : before + 8] in ("babababa", "abababab")


def test_newcomer_to_an_empty_queue_starts_where_the_last_one_left_it() -> None:
    harness = make_harness(num_slots=2)
    add(harness, "a", 6)
    harness.run()
    add(harness, "b", 1)
    add(harness, "a", 4)
    add(harness, "b", 4)
    harness.run()
    assert boarded(harness)[6:12].count("b") == 3


def test_slots_are_never_left_free_while_somebody_waits() -> None:
    """Work-conserving: alone, a tenant of little weight has everything."""
    harness = make_harness({"a": Share(0.01)}, num_slots=4)
    add(harness, "a", 12)
    add(harness, "b", 1)
    harness.turn()
    assert harness.scheduler.num_running == 4
    harness.run()


def test_tenant_runs_no_more_than_its_limit_and_the_others_pass_it() -> None:
    harness = make_harness({"a": Share(1.0, 2)}, num_slots=4)
    add(harness, "a", 6)
    add(harness, "b", 2)
    while harness.scheduler.requests:
        harness.turn()
        running = [request.tenant for request in harness.scheduler.running.values()]
        assert running.count("a") <= 2
    assert boarded(harness)[:4].count("b") == 2
    assert reasons(harness, -1)[0] is WaitReason.TENANT_LIMIT, "slots are free, and nobody may take them"


def test_limited_tenant_does_not_drag_newcomers_below_the_others() -> None:
    """a is held to one slot of four and falls behind; c must not start from a's counter."""
    harness = make_harness({"a": Share(1.0, 1)}, num_slots=4)
    add(harness, "a", 60)
    add(harness, "b", 100)
    for _ in range(60):
        harness.turn()
    before = len(boarded(harness))
    add(harness, "c", 40)
    for _ in range(40):
        harness.turn()
    since = boarded(harness)[before:]
    assert abs(since.count("b") - since.count("c")) <= 4
    harness.run()


def test_those_passed_over_learn_why() -> None:
    harness = make_harness({"limited": Share(1.0, 1)}, num_slots=3)
    add(harness, "limited", 2, num_output=60)  # 0 runs, 1 is over the limit
    add(harness, "a", 6, num_prompt=30, num_output=30)  # 2 and 3 run, 4 waits
    harness.turn()
    add(harness, "b", 2)  # 8 is next, as b has been served less than a; both together are more than b's share
    harness.turn()
    harness.turn()
    assert reasons(harness, 1) == [WaitReason.TENANT_LIMIT, WaitReason.TENANT_LIMIT]
    assert reasons(harness, 4) == [WaitReason.NO_SLOT, WaitReason.OVER_SHARE]
    assert reasons(harness, 8) == [WaitReason.NO_SLOT]
    harness.run()


def test_cached_prompt_tokens_cost_nothing() -> None:
    """Both tenants repeat one prompt each; what the cache has, at boarding or later, is not charged."""
    harness = make_harness(num_slots=4, block_size=4, max_num_batched_tokens=24)
    policy = harness.scheduler.policy
    assert isinstance(policy, Fair)
    for request_id in range(4):
        harness.add(make_request(request_id, list(range(40)), max_tokens=1, tenant="a"))
    harness.run()
    computed = harness.num_computed_tokens()
    assert computed < 4 * 40
    assert policy._accounts["a"].counter == (computed + 4 * 2) << 20


@pytest.mark.parametrize("num_prompt", range(33, 101))
def test_what_the_cache_has_after_boarding_is_given_back_also_where_one_token_is_left(num_prompt: int) -> None:
    """Two tenants with one prompt at once: blocks of the first turn up while the second is on board."""
    harness = make_harness(num_slots=4, block_size=32, max_num_batched_tokens=64)
    policy = harness.scheduler.policy
    assert isinstance(policy, Fair)
    for request_id, tenant in enumerate("ab"):
        harness.add(make_request(request_id, list(range(num_prompt)), max_tokens=3, tenant=tenant))
    for _ in range(200):  # not to the end of both: the account of one that is idle is settled
        if len(harness.received.get(1, ())) >= 2:
            break
        harness.turn()
    request = harness.requests[1]
    num_due = num_prompt - request.num_cached_tokens
    assert policy._accounts["b"].counter == (num_due + 2 * len(harness.received[1])) << 20


def test_recomputed_tokens_are_not_charged_again() -> None:
    small = Harness(make_scheduler(policy=Fair(), num_blocks=12, block_size=4, max_num_seqs=4, prefix_caching=False))
    for request_id in range(4):
        small.add(make_request(request_id, 8, max_tokens=20, tenant="a"))
    policy = small.scheduler.policy
    assert isinstance(policy, Fair)
    small.run()
    assert small.counts["preemptions"] > 0
    num_outputs = sum(len(tokens) for tokens in small.received.values())
    assert policy._accounts["a"].counter == (4 * 8 + 2 * num_outputs) << 20


def test_tenants_that_come_once_leave_nothing_behind() -> None:
    harness = make_harness(num_slots=4)
    policy = harness.scheduler.policy
    assert isinstance(policy, Fair)
    for i in range(2_000):
        add(harness, f"tenant {i}", num_prompt=2, num_output=1)
        harness.turn()
    harness.run()
    assert len(policy._accounts) < 200
    assert not policy._boarded


def num_preempted(harness: Harness) -> int:
    return sum(len(plan.preempted) for plan in harness.plans)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fair", "fair-prefix"])
def test_who_runs_nothing_takes_the_place_of_the_last_to_board_of_a_flood(policy: str, depth: int) -> None:
    harness = Harness(make_scheduler(policy=policy, max_num_seqs=4, num_blocks=200), depth=depth)
    add(harness, "flood", 8, num_output=60)
    for _ in range(6):
        harness.turn()
    add(harness, "quiet", 1, num_output=5)  # 8
    first = len(harness.plans)
    harness.run()
    assert [plan.preempted for plan in harness.plans if plan.preempted] == [[3]]
    boarded = next(i for i, plan in enumerate(harness.plans) if 8 in {a.request_id for a in plan.admitted})
    assert boarded - first <= 2


@pytest.mark.parametrize("num_tenants", [2, 3, 8, 20])
def test_tenants_that_all_want_more_than_their_share_keep_their_places(num_tenants: int) -> None:
    harness = make_harness(num_slots=8)
    for i in range(num_tenants):
        add(harness, f"tenant-{i}", 40, num_output=5 + 7 * i % 40)
    for _ in range(60):
        harness.turn()
    assert len(harness.finished) > 8
    assert num_preempted(harness) == 0


def test_tenants_with_one_request_each_keep_their_places() -> None:
    harness = make_harness(num_slots=4)
    for i in range(20):
        add(harness, f"tenant-{i}", 1, num_output=10)
    harness.run()
    assert num_preempted(harness) == 0


def test_who_comes_with_more_than_the_share_waits_for_places_to_come_free() -> None:
    harness = make_harness(num_slots=8)
    add(harness, "a", 20, num_output=50)
    for _ in range(10):
        harness.turn()
    add(harness, "b", 5, num_output=50)
    for _ in range(30):
        harness.turn()
    assert num_preempted(harness) == 0
    add(harness, "c", 2, num_output=50)
    for _ in range(5):
        harness.turn()
    assert num_preempted(harness) == 2
