"""Nothing of a finished request stays: every map is empty, and memory is flat."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Sized

import pytest
from tests.core.harness import make_request, make_scheduler
from tests.measuring import least

from everystop.core.policy.waiting import WaitingLine
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner


def serve(scheduler: Scheduler, first_id: int, num_groups: int) -> None:
    """Serve tiny groups of two, 16 groups at a time, as a server would: nobody keeps the events."""
    loop = StepLoop(scheduler, SimulatedRunner(lambda plan: 1, lambda ns: None), lambda: 0)
    for i in range(num_groups):
        for k in range(2):
            group = first_id + 2 * i
            scheduler.add(make_request(group + k, [i % 50, 3], n=2, group_id=group, choice_index=k, max_tokens=1), 0)
        while i % 16 == 15 and scheduler.has_work:
            loop.turn()
    while scheduler.has_work:
        loop.turn()
    loop.turn()


def sizes_of(scheduler: Scheduler) -> dict[str, int]:
    """How many things each container of the scheduler and its parts holds."""
    roster = scheduler.roster
    parts = (scheduler, roster, scheduler.batch, roster.siblings, scheduler.policy)
    owned = {name: value for part in parts for name, value in vars(part).items()}
    return {
        name: len(value) for name, value in owned.items() if isinstance(value, Sized) and not isinstance(value, tuple)
    }


def leftovers(scheduler: Scheduler) -> dict[str, int]:
    """The containers that should be empty once nobody is left, and are not."""
    return {name: size for name, size in sizes_of(scheduler).items() if size and name != "free_slots"}


@pytest.mark.parametrize("policy", ["continuous", "static", "static-padded"])
def test_every_map_is_empty_after_the_last_request(policy: str) -> None:
    scheduler = make_scheduler(policy=policy)
    serve(scheduler, 0, 100)
    sizes = sizes_of(scheduler)
    assert {"requests", "running", "held", "_groups", "_parked", "outstanding", "_line"} <= sizes.keys()
    assert sizes["free_slots"] == scheduler.limits.max_num_seqs
    assert not leftovers(scheduler)


def test_memory_is_flat_over_twenty_thousand_requests_of_two_choices() -> None:
    scheduler = make_scheduler(max_num_seqs=32)
    serve(scheduler, 0, 1_000)
    first_ids = itertools.count(100_000, 100_000)

    def num_grown() -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        serve(scheduler, next(first_ids), 20_000)
        gc.collect()
        return sys.getallocatedblocks() - before

    assert least(num_grown, enough=500, tries=3) < 500


def test_requests_that_leave_a_blocked_line_leave_nothing_in_it() -> None:
    """The head cannot board; many come and go behind it."""
    line = WaitingLine()
    head = make_request(0, 1)
    line.push(head)
    for i in range(1, 10_000):
        request = make_request(i, 1)
        line.push(request)
        line.discard(request)
    assert line.head() is head
    assert len(line._heap) < 200
