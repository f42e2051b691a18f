"""Shortest first: the least remaining work boards first, and a long prompt waits no longer than its bound."""

from __future__ import annotations

from tests.core.harness import STEP_NS, Harness, make_request, make_scheduler

from everystop.core.events import AdmitEvent, FinishEvent, PreemptEvent
from everystop.core.policy import Shortest
from everystop.core.request import Request, RequestState

LONG_NS = 10**12


def boarded(harness: Harness) -> list[int]:
    return [event.request_id for event in harness.events if isinstance(event, AdmitEvent)]


def test_shortest_prompt_boards_first_and_displaces_nobody() -> None:
    harness = Harness(make_scheduler(policy="shortest", max_num_seqs=1, ageing_ns=LONG_NS))
    harness.add(make_request(0, 40, max_tokens=30))
    harness.turn()
    for request_id, num_prompt in enumerate([30, 10, 20, 10], start=1):
        harness.add(make_request(request_id, num_prompt, max_tokens=3))
    harness.run()
    assert boarded(harness) == [0, 2, 4, 3, 1]
    assert not [event for event in harness.events if isinstance(event, PreemptEvent)]


def test_prompt_with_the_least_left_is_computed_first_among_the_running() -> None:
    harness = Harness(make_scheduler(policy="shortest", num_blocks=100, max_num_batched_tokens=64, ageing_ns=LONG_NS))
    harness.add(make_request(0, 600, max_tokens=1))
    harness.turn()
    harness.add(make_request(1, 300, max_tokens=1))
    harness.turn()
    harness.turn()
    assert [row.request_id for row in harness.plans[-1].rows] == [1, 0]
    harness.run()


def test_oracle_orders_by_all_the_work_that_is_left() -> None:
    def work(request: Request) -> int:
        return request.num_prompt_tokens + request.max_tokens - request.num_scheduled_through

    harness = Harness(make_scheduler(policy=Shortest(LONG_NS, work), max_num_seqs=1))
    for request_id, (num_prompt, num_output) in enumerate([(10, 50), (20, 5), (2, 40)]):
        harness.add(make_request(request_id, num_prompt, max_tokens=num_output))
    harness.run()
    assert [event.request_id for event in harness.events if isinstance(event, FinishEvent)] == [1, 2, 0]


def test_long_prompt_is_overtaken_only_by_those_who_arrive_within_its_bound() -> None:
    """Short prompts arrive faster than one slot serves them, for ever; 60 tokens at one step each wait 60 steps."""
    harness = Harness(make_scheduler(policy="shortest", max_num_seqs=1, ageing_ns=1000 * STEP_NS))
    harness.add(make_request(0, 1, max_tokens=3))
    harness.turn()
    long = harness.add(make_request(1, 60, max_tokens=2))
    for request_id in range(2, 400):
        harness.add(make_request(request_id, 2, max_tokens=4))
        for _ in range(3):
            harness.turn()
        if long.state is RequestState.FINISHED:
            break
    earlier = [harness.requests[i].arrival_ns for i in boarded(harness)[: boarded(harness).index(1)]]
    assert long.state is RequestState.FINISHED
    assert max(earlier) < long.arrival_ns + 60 * STEP_NS
    assert len(earlier) >= 10, "they do go first as long as they may"
    harness.run()
