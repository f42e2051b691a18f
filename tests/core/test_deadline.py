"""Deadlines: who can be on time goes first, who cannot is put back and not forgotten, and steps know how long they may
last.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.core.harness import STEP_NS, Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, PreemptEvent, WaitEvent, WaitReason
from everystop.core.policy import Deadline, Share, Targets
from everystop.core.policy.deadline import LATE_TURN, LENGTH_WEIGHT
from everystop.core.request import Request
from everystop.core.step_time import StepTimeModel

LONG_NS = 10**12


def make_harness(
    *,
    ttft_ns: int = LONG_NS,
    itl_ns: int | None = None,
    step_ns: float = 0.0,
    token_ns: float = 0.0,
    shares: dict[str, Share] | None = None,
    depth: int = 0,
    **settings: Any,
) -> Harness:
    """A harness over the policy, to which steps and tokens seem to take so long, whatever the real steps say."""
    model = StepTimeModel(step_ns=step_ns, token_ns=token_ns)
    scheduler = make_scheduler(policy=Deadline(Targets(ttft_ns, itl_ns), shares), step_times=model, **settings)
    scheduler._pace.learn = lambda *step, **how: None  # type: ignore[method-assign, union-attr]
    return Harness(scheduler, depth=depth)


def boarded(harness: Harness) -> list[int]:
    return [event.request_id for event in harness.events if isinstance(event, AdmitEvent)]


def target_ns(harness: Harness) -> int | None:
    """What the policy would allow a step that is planned now."""
    return harness.scheduler.policy.step_target_ns(harness.scheduler.roster.look(harness.now_ns))


def test_earliest_deadline_boards_first_and_the_request_knows_better_than_its_tenant() -> None:
    harness = make_harness(ttft_ns=500 * STEP_NS, shares={"b": Share(ttft_ns=300 * STEP_NS)}, max_num_seqs=1)
    harness.add(make_request(0, 4, max_tokens=2))
    harness.add(make_request(1, 4, max_tokens=2, tenant="b"))
    harness.add(make_request(2, 4, max_tokens=2, tenant="b", ttft_target_ns=400 * STEP_NS))
    harness.add(make_request(3, 4, max_tokens=2, tenant="c", ttft_target_ns=200 * STEP_NS))
    harness.run()
    assert boarded(harness) == [3, 1, 2, 0]


def test_arrival_counts_where_targets_are_equal() -> None:
    harness = make_harness(ttft_ns=500 * STEP_NS, max_num_seqs=1)
    for request_id, early_by in enumerate([0, 0, 150, 50]):
        harness.add(make_request(request_id, 4, max_tokens=60, ttft_target_ns=(500 - early_by) * STEP_NS))
        for _ in range(20):
            harness.turn()
    harness.run()
    assert boarded(harness) == [0, 2, 3, 1]


def test_length_is_weighed_against_the_deadline() -> None:
    """A token seems to take a millisecond: 100 tokens count as much as 200 ms."""
    ms = 1_000_000
    for gap, order in [(190, [1, 2, 0]), (210, [1, 0, 2])]:
        harness = make_harness(token_ns=ms, max_num_seqs=1, max_num_batched_tokens=512)
        harness.add(make_request(0, 110, max_tokens=1, ttft_target_ns=LONG_NS))
        harness.add(make_request(1, 10, max_tokens=1, ttft_target_ns=LONG_NS))
        harness.add(make_request(2, 10, max_tokens=1, ttft_target_ns=LONG_NS + gap * ms))
        harness.run()
        assert boarded(harness) == order
    assert LENGTH_WEIGHT == 2


@pytest.mark.parametrize(("num_prompt", "is_late"), [(20, False), (30, True)])
def test_request_that_could_no_longer_be_on_time_is_put_back(num_prompt: int, is_late: bool) -> None:
    """A slot is free after 30 steps; a token seems to take a step, and the first is due 80 steps after arrival, which
    leaves 50 to a prompt that has half of each.
    """
    harness = make_harness(token_ns=STEP_NS, max_num_seqs=1, max_num_batched_tokens=512)
    harness.add(make_request(0, 4, max_tokens=30))
    harness.turn()
    harness.add(make_request(1, num_prompt, max_tokens=2, ttft_target_ns=80 * STEP_NS))
    harness.add(make_request(2, 4, max_tokens=2, ttft_target_ns=800 * STEP_NS))
    harness.run()
    assert boarded(harness) == ([0, 2, 1] if is_late else [0, 1, 2])
    reasons = [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == 1]
    assert (WaitReason.LATE in reasons) == is_late


@pytest.mark.parametrize(("ttft_steps", "is_late"), [(89, False), (87, True)])
def test_prompts_on_board_that_go_before_delay_a_first_token(ttft_steps: int, is_late: bool) -> None:
    """A token seems to take a step; 68 of the first prompt are left, and 20 of the own."""
    harness = make_harness(token_ns=STEP_NS, max_num_seqs=2, max_num_batched_tokens=32, block_size=4)
    harness.add(make_request(0, 100, max_tokens=5, ttft_target_ns=1))
    harness.turn()
    harness.now_ns += 500 * STEP_NS
    harness.add(make_request(1, 20, max_tokens=5, ttft_target_ns=ttft_steps * STEP_NS))
    policy = harness.scheduler.policy
    assert isinstance(policy, Deadline)
    policy.pick(harness.scheduler.roster.look(harness.now_ns))
    assert len(policy._late) == is_late
    harness.run()


@pytest.mark.parametrize("is_cached", [False, True])
def test_cached_prefix_makes_nobody_late(is_cached: bool) -> None:
    """A token seems to take a step: 64 are too many for a first token within 20, but the last 16 are not."""
    harness = make_harness(token_ns=STEP_NS, block_size=16)
    harness.add(make_request(0, range(48), max_tokens=2))
    harness.run()
    prefix = range(48) if is_cached else range(100, 148)
    harness.add(make_request(1, [*prefix, *range(200, 216)], max_tokens=2, ttft_target_ns=20 * STEP_NS))
    policy = harness.scheduler.policy
    assert isinstance(policy, Deadline)
    policy.pick(harness.scheduler.roster.look(harness.now_ns))
    assert len(policy._late) == (not is_cached)
    harness.run()


@pytest.mark.parametrize(("itl_steps", "is_late"), [(40, False), (12, True)])
def test_short_steps_for_the_sake_of_decoders_delay_a_first_token(itl_steps: int, is_late: bool) -> None:
    """A step costs 10, and a token a tenth; the decoder's target leaves 290 tokens to a step, or 16 at the least."""
    times = {"step_ns": 10 * STEP_NS, "token_ns": STEP_NS / 10}
    harness = make_harness(max_num_seqs=4, max_num_batched_tokens=512, num_blocks=100, **times)
    harness.add(make_request(0, 4, max_tokens=50, itl_target_ns=itl_steps * STEP_NS))
    harness.turn()
    harness.add(make_request(1, 320, max_tokens=5, ttft_target_ns=80 * STEP_NS))
    policy = harness.scheduler.policy
    assert isinstance(policy, Deadline)
    policy.pick(harness.scheduler.roster.look(harness.now_ns))
    assert len(policy._late) == is_late
    harness.run()


def test_third_prompt_waits_in_line_unless_it_goes_before_one_on_board() -> None:
    """Two long prompts fill every step; a patient one would only be in the way of an urgent one."""
    harness = make_harness(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=500)
    for request_id in range(3):
        harness.add(make_request(request_id, 1_000, max_tokens=2))
    harness.turn()
    harness.turn()
    assert boarded(harness) == [0, 1]
    harness.add(make_request(3, 20, max_tokens=2, ttft_target_ns=300 * STEP_NS))
    harness.turn()
    assert boarded(harness) == [0, 1, 3]
    assert [e.reason for e in harness.events if isinstance(e, WaitEvent) and e.request_id == -1] == ["token_budget"]
    assert sum(row.num_tokens for plan in harness.plans for row in plan.rows) == 64 * len(harness.plans), "none is lost"
    harness.run()


def test_short_prompts_board_as_long_as_a_step_has_room() -> None:
    harness = make_harness(max_num_seqs=16, max_num_batched_tokens=128)
    for request_id in range(12):
        harness.add(make_request(request_id, 10, max_tokens=2))
    harness.turn()
    assert len(boarded(harness)) == 12
    harness.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_late_requests_have_every_eighth_turn_in_the_order_in_which_they_were_late(depth: int) -> None:
    """Requests that are on time stream in for ever, one for each that a slot is free for."""
    harness = make_harness(max_num_seqs=1, depth=depth)
    harness.add(make_request(0, 4, max_tokens=20))
    harness.turn()
    for request_id in range(1, 6):
        harness.add(make_request(request_id, 4, max_tokens=2, ttft_target_ns=(15 - request_id) * STEP_NS))
    next_id = 6
    while not all(i in harness.finished for i in range(1, 6)):
        while harness.scheduler.num_waiting < 8:
            harness.add(make_request(next_id, 4, max_tokens=2))
            next_id += 1
        harness.turn()
    places = [boarded(harness).index(request_id) for request_id in range(1, 6)]
    late = sorted(places)
    assert all(b - a == LATE_TURN for a, b in pairwise(late)), "one in eight, no more, no less"
    assert late[-1] <= 1 + LATE_TURN * 5, "the k-th within 8 k boardings"
    assert places == sorted(places, reverse=True), "due soonest, so late first"
    harness.run()


def test_late_requests_fill_what_nobody_on_time_wants() -> None:
    harness = make_harness(max_num_seqs=2)
    for request_id in range(6):
        harness.add(make_request(request_id, 4, max_tokens=5, ttft_target_ns=1))
    harness.turn()
    assert boarded(harness) == [0, 1]
    assert harness.run() <= 20


def test_late_request_counts_as_new_when_it_boards() -> None:
    """So nobody who arrives later with as much time computes a prompt, or keeps blocks, before it."""
    harness = make_harness(ttft_ns=10 * STEP_NS, max_num_seqs=3, max_num_batched_tokens=32, num_blocks=200)
    harness.add(make_request(0, 4, max_tokens=30))
    harness.add(make_request(1, 4, max_tokens=30))
    harness.add(make_request(2, 4, max_tokens=30))
    harness.turn()
    late = harness.add(make_request(3, 400, max_tokens=2))
    while late.request_id not in harness.scheduler.running:
        harness.turn()
    fresh = harness.add(make_request(4, 300, max_tokens=2))
    harness.turn()
    view, policy = harness.scheduler.roster.look(harness.now_ns), harness.scheduler.policy
    assert policy.keep_key(late, view) < policy.keep_key(fresh, view)
    harness.run()


def preempted_once(depth: int) -> tuple[Harness, Request]:
    """Two requests outgrow the pool, and the one that is due later loses its place; it has a target for its tokens."""
    harness = make_harness(num_blocks=5, max_num_seqs=2, depth=depth)
    harness.add(make_request(0, 20, max_tokens=40, ttft_target_ns=LONG_NS))
    victim = harness.add(make_request(1, 20, max_tokens=40, ttft_target_ns=2 * LONG_NS, itl_target_ns=STEP_NS))
    while not harness.counts["preemptions"]:
        harness.turn()
    return harness, victim


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_request_is_never_late_and_returns_by_its_rank(depth: int) -> None:
    harness, victim = preempted_once(depth)
    harness.add(make_request(2, 20, max_tokens=2, ttft_target_ns=3 * LONG_NS))
    harness.now_ns += 2 * LONG_NS
    harness.run()
    assert [e.request_id for e in harness.events if isinstance(e, PreemptEvent)] == [1]
    assert boarded(harness) == [0, 1, 1, 2]
    assert victim.num_preemptions == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_step_may_last_until_the_first_running_decoder_is_due(depth: int) -> None:
    harness = make_harness(depth=depth, max_num_seqs=4)
    assert target_ns(harness) is None
    harness.add(make_request(0, 4, max_tokens=30))
    harness.turn()
    harness.turn()
    assert target_ns(harness) is None, "nobody has a target"
    harness.add(make_request(1, 4, max_tokens=20, itl_target_ns=7 * STEP_NS))
    harness.add(make_request(2, 4, max_tokens=9, itl_target_ns=3 * STEP_NS))
    while len(harness.output(2)) < 2:
        harness.turn()
    assert target_ns(harness) == 3 * STEP_NS
    harness.now_ns += STEP_NS
    assert target_ns(harness) == 2 * STEP_NS
    harness.now_ns += 9 * STEP_NS
    assert target_ns(harness) == 1, "it is overdue, and 0 would mean that there is no target"
    while 2 not in harness.finished:
        harness.turn()
    assert target_ns(harness) == 7 * STEP_NS
    harness.run()
    assert target_ns(harness) is None


@pytest.mark.parametrize("depth", [0, 1])
def test_request_that_lost_its_place_shortens_no_step(depth: int) -> None:
    """Also where a token of it was on its way."""
    harness, victim = preempted_once(depth)
    for _ in range(3):
        harness.turn()
        assert victim.request_id not in harness.scheduler.running
        assert target_ns(harness) is None
    harness.run()


@pytest.mark.parametrize(("of_request", "of_tenant", "expected"), [(2, 3, 2), (None, 3, 3), (None, None, 5)])
def test_target_for_later_tokens_is_the_requests_or_its_tenants_or_the_default(
    of_request: int | None, of_tenant: int | None, expected: int
) -> None:
    share = Share(itl_ns=None if of_tenant is None else of_tenant * STEP_NS)
    harness = make_harness(itl_ns=5 * STEP_NS, shares={"a": share})
    own_ns = None if of_request is None else of_request * STEP_NS
    harness.add(make_request(0, 4, max_tokens=5, tenant="a", itl_target_ns=own_ns))
    harness.turn()
    assert target_ns(harness) == expected * STEP_NS
    harness.run()


def test_choices_that_waited_for_their_siblings_prompt_are_not_late() -> None:
    """The second choice is parked until its deadline has passed, and others have taken the slots by then."""
    harness = make_harness(max_num_seqs=3, max_num_batched_tokens=32, num_blocks=100)
    harness.add(make_request(9, 4, max_tokens=100))
    harness.turn()
    harness.add_group(0, 600, 2, max_tokens=2, ttft_target_ns=3 * STEP_NS)
    harness.turn()
    harness.add(make_request(8, 4, max_tokens=60))
    harness.turn()
    harness.add(make_request(5, 8, max_tokens=2))
    harness.run()
    assert harness.counts["forks"] == 0, "the slots are full until the first choice has gone"
    assert boarded(harness) == [9, 0, 8, 1, 5]


def test_policy_forgets_whoever_has_left() -> None:
    harness = make_harness(ttft_ns=5 * STEP_NS, itl_ns=STEP_NS, max_num_seqs=2)
    for request_id in range(9):
        harness.add(make_request(request_id, 4, max_tokens=9))
    for _ in range(8):
        harness.turn()
    for request_id in range(9):
        harness.abort(request_id)
    harness.run()
    policy = harness.scheduler.policy
    assert isinstance(policy, Deadline)
    assert [policy._ranks, policy._deadlines_ns, policy._itl_ns, policy._due_ns] == [{}] * 4
    assert len(policy._line) == len(policy._late) == len(policy._prompts._ranked) == 0
