"""Clients leave in every state: each time a clean end or nothing at all, and the blocks come back."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, make_request, make_scheduler, state_of

from everystop.core.policy import POLICIES
from everystop.core.request import RequestState


def in_state(state: str, depth: int) -> tuple[Harness, int]:
    """A harness with company, and the id of a request in the wanted state."""
    policy = "priority" if state == "preempted" else "continuous"
    max_num_seqs = 3 if state == "forking" else 2
    scheduler = make_scheduler(policy=policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=8)
    harness = Harness(scheduler, depth=depth)
    if state == "unknown":
        return harness, 99
    harness.add(make_request(0, 12, max_tokens=12, priority=3))
    if state in ("waiting", "just added"):
        harness.add(make_request(1, 12, max_tokens=12))
        harness.add(make_request(2, 12, max_tokens=12))
        for _ in range(5 if state == "waiting" else 0):
            harness.turn()
        return harness, 2
    if state == "forking":
        harness.add_group(10, 20, 2, max_tokens=5)
        while harness.requests[11].state is not RequestState.FORKING:
            harness.turn()
        return harness, 11
    if state == "preempted":
        harness.turn()
        harness.turn()
        for i in (1, 2):
            harness.add(make_request(i, 4, max_tokens=9, priority=0))
        while harness.requests[0].state is not RequestState.PREEMPTED:
            harness.turn()
        return harness, 0
    for _ in range({"prefilling": 1, "decoding": 5, "finished": 60}[state]):
        harness.turn()
    return harness, 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "state",
    ["unknown", "just added", "waiting", "forking", "preempted", "prefilling", "decoding", "finished"],
)
def test_abort_is_a_clean_end_in_every_state(state: str, depth: int) -> None:
    harness, request_id = in_state(state, depth)
    is_there = request_id in harness.scheduler.requests
    assert is_there == (state not in ("unknown", "finished"))
    assert harness.abort(request_id) == is_there
    harness.run()
    if is_there:
        assert harness.finished[request_id].reason == "abort"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_turns", range(6))
def test_abort_between_planning_and_execution(num_turns: int, depth: int) -> None:
    """Also of the only running request: what is left of the plan is executed and thrown away."""
    harness = Harness(make_scheduler(max_num_batched_tokens=8), depth=depth)
    harness.add(make_request(0, 20, max_tokens=9))
    for _ in range(num_turns):
        harness.turn()
    harness.abort_before_execution.append(0)
    harness.turn()
    assert harness.finished[0].reason == "abort"
    harness.run()
    assert harness.counts["wasted rows"] >= 1


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_of_an_aborted_request_are_free_at_the_next_update(depth: int) -> None:
    harness = Harness(make_scheduler(), depth=depth)
    harness.add(make_request(0, 40, max_tokens=9))
    harness.turn()
    harness.turn()
    harness.abort(0)
    harness.turn()
    assert harness.scheduler.kv.pool.num_free == harness.scheduler.kv.pool.num_blocks


def random_run_with_aborts(seed: int) -> set[str]:
    """A few requests in a tiny pool, aborted at random; returns the states in which they were."""
    states: set[str] = set()
    rng = random.Random(seed)
    scheduler = make_scheduler(
        policy=rng.choice(POLICIES),
        num_blocks=8,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=rng.choice([3, 8, 20]),
    )
    harness = Harness(scheduler, depth=seed % 2)
    harness.add_group(0, 5, 2, max_tokens=8)
    for i in range(2, 6):
        harness.add(make_request(i, rng.randint(1, 14), max_tokens=10, priority=rng.randrange(2)))
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(0, 4)):
            harness.turn()
        request_id = rng.randint(0, 6)
        states.add(state_of(harness.scheduler.requests.get(request_id)))
        harness.abort(request_id)
    harness.run(max_turns=300)
    return states


def test_random_runs_with_aborts_anywhere() -> None:
    """Two hundred; a thousand are among the acceptance cases."""
    states = set().union(*map(random_run_with_aborts, range(200)))
    assert states == {
        "waiting",
        "forking",
        "preempted",
        "running-prefill",
        "running-decode",
        "in flight",
        "finished or unknown",
    }
