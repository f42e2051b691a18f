"""Thrifty: the victim is who has least to compute again, and nobody pays for ever."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, PreemptEvent
from everystop.core.request import RequestState


def victims(harness: Harness) -> list[int]:
    return [event.request_id for event in harness.events if isinstance(event, PreemptEvent)]


def serve_old_short_and_young_long(policy: str, *, shared: bool = False) -> Harness:
    """Three requests that fill 13 blocks of 8 and grow: one of 50 tokens, a short one, then one of 40."""
    harness = Harness(make_scheduler(policy=policy, num_blocks=14, block_size=8, max_num_batched_tokens=256))
    first = list(range(50))
    harness.add(make_request(0, first, max_tokens=30))
    harness.turn()
    harness.add(make_request(1, 3, max_tokens=30))
    harness.add(make_request(2, [*first[:40], 999] if shared else 41, max_tokens=30))
    return harness


def test_least_is_lost_where_the_youngest_would_lose_more() -> None:
    harness = serve_old_short_and_young_long("thrifty")
    harness.run()
    assert victims(harness)[0] == 1
    youngest = serve_old_short_and_young_long("continuous")
    youngest.run()
    assert victims(youngest)[0] == 2
    lost = [next(e.num_lost_tokens for e in h.events if isinstance(e, PreemptEvent)) for h in (harness, youngest)]
    assert 2 * lost[0] < lost[1]


def test_blocks_that_others_hold_too_are_not_lost() -> None:
    """Of a prompt of 41 tokens 40 are the older one's: there is less to lose than 3 tokens and what came since."""
    harness = serve_old_short_and_young_long("thrifty", shared=True)
    for _ in range(4):
        harness.turn()
    running, view = harness.scheduler.running, harness.scheduler.roster.view
    assert view.num_private_tokens(running[2]) < view.num_private_tokens(running[1])
    assert harness.scheduler.policy.keep_key(running[0], view) < harness.scheduler.policy.keep_key(running[1], view)
    harness.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_small_request_among_large_ones_does_not_pay_for_ever(prefix_caching: bool, depth: int) -> None:
    """Large requests stream in without end and always have more to lose; after two losses the small one keeps."""
    harness = Harness(
        make_scheduler(
            policy="thrifty", num_blocks=16, block_size=4, max_num_seqs=4, max_preemptions=2,
            prefix_caching=prefix_caching,
        ),
        depth=depth,
    )  # fmt: skip
    small = harness.add(make_request(0, 2, max_tokens=40))
    for request_id in range(1, 200):
        harness.add(make_request(request_id, 24, max_tokens=20))
        for _ in range(4):
            harness.turn()
        if small.state is RequestState.FINISHED:
            break
    assert small.state is RequestState.FINISHED
    assert small.num_preemptions == 2
    harness.run(max_turns=20_000)


@pytest.mark.parametrize("seed", range(6))
def test_undersized_pool_of_sharers_makes_progress(seed: int) -> None:
    """What a request would lose changes as others board and leave; still all end, and the storm is bounded."""
    dice = random.Random(seed)
    harness = Harness(
        make_scheduler(policy="thrifty", num_blocks=12, block_size=4, max_num_seqs=6, max_preemptions=4),
        depth=seed % 2,
    )
    prefixes = [list(range(20)), list(range(100, 116))]
    for request_id in range(40):
        prompt = [*dice.choice(prefixes), *(dice.randrange(64) for _ in range(dice.randint(1, 6)))]
        harness.add(make_request(request_id, prompt, max_tokens=dice.randint(1, 22)))
        for _ in range(dice.randint(0, 3)):
            harness.turn()
    harness.run(max_turns=5_000)
    assert 0 < len(victims(harness)) <= 40 * 4


def test_boarding_is_in_order_of_arrival() -> None:
    harness = Harness(make_scheduler(policy="thrifty", max_num_seqs=2))
    for request_id, num_prompt in enumerate([20, 3, 30, 1]):
        harness.add(make_request(request_id, num_prompt, max_tokens=4))
    harness.run()
    assert [event.request_id for event in harness.events if isinstance(event, AdmitEvent)] == [0, 1, 2, 3]
