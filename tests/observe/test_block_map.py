"""The block map against the real pool, after every turn of fuzzed schedules."""

from __future__ import annotations

import itertools

import pytest
from tests.core.fuzz import ROTATION, Episode
from tests.core.harness import Harness, make_request, make_scheduler
from tests.observe.turns import after_each_turn

from everystop.core.scheduler import Scheduler
from everystop.observe.block_map import EVICTABLE, FREE, NOBODY, PRIVATE, SHARED, BlockRun, block_runs


def spread(scheduler: Scheduler) -> list[BlockRun]:
    """Each block as a run of its own, as the map says."""
    runs = block_runs(scheduler.block_event(0))
    for one, other in itertools.pairwise(runs):
        assert one._replace(num=1) != other._replace(num=1), "neighbouring runs that are one"
    assert all(run.num > 0 for run in runs)
    return [run._replace(num=1) for run in runs for _ in range(run.num)]


def look_up(scheduler: Scheduler, block: int) -> BlockRun:
    """One block, asked of the pool and of every request: the slow and obvious way."""
    pool, batch = scheduler.kv.pool, scheduler.batch
    if pool.ref_count[block] == 0:
        return BlockRun(EVICTABLE if pool.is_published(block) else FREE, 1, NOBODY, 0, ())
    owners = [r.request_id for r in (*batch.running.values(), *batch.held.values()) if block in r.block_table]
    kind = PRIVATE if pool.ref_count[block] == 1 else SHARED
    return BlockRun(kind, 1, owners[0] if owners else NOBODY, len(owners), tuple(owners[1:3]))


def check(scheduler: Scheduler) -> set[str]:
    """Compare all blocks; returns the kinds that were there."""
    found = spread(scheduler)
    assert found == [look_up(scheduler, block) for block in range(scheduler.kv.pool.num_blocks)]
    kinds = [run.kind for run in found]
    assert kinds.count(FREE) + kinds.count(EVICTABLE) == scheduler.kv.pool.num_free
    assert kinds.count(EVICTABLE) == scheduler.kv.pool.num_cached
    return set(kinds)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_map_is_the_pool_after_every_turn_of_fuzzed_schedules(depth: int) -> None:
    kinds: set[str] = set()
    kept_for_nobody: list[int] = []

    def look(harness: Harness) -> None:
        kinds.update(check(harness.scheduler))
        runs = block_runs(harness.scheduler.block_event(0))
        kept_for_nobody.extend(run.num for run in runs if run.kind in (PRIVATE, SHARED) and run.owner == NOBODY)

    for index, policy in enumerate(ROTATION):
        episode = Episode(f"blocks:{index}:{depth}", policy, depth, abort_rate=0.1)
        after_each_turn(episode.harness, look)
        episode.run(40)
    assert kinds == {FREE, PRIVATE, SHARED, EVICTABLE}
    assert bool(kept_for_nobody) == (depth == 1)


def test_a_shared_block_names_the_first_three_on_board_and_counts_all() -> None:
    harness = Harness(make_scheduler(num_blocks=64, block_size=4, max_num_seqs=8))
    harness.add(make_request(0, list(range(9)), max_tokens=20))
    harness.turn()
    for request_id in range(1, 8):
        harness.add(make_request(request_id, list(range(9)), max_tokens=20))
    harness.turn()
    assert block_runs(harness.scheduler.block_event(0))[0] == BlockRun(SHARED, 2, 0, 8, (1, 2))


def test_a_shared_block_belongs_to_the_first_on_board() -> None:
    harness = Harness(make_scheduler(num_blocks=16, block_size=4, max_num_seqs=4))
    harness.add(make_request(0, list(range(9)), max_tokens=20))
    harness.turn()
    harness.add(make_request(1, list(range(9)), max_tokens=20))
    harness.turn()
    found = spread(harness.scheduler)
    assert found[:2] == [BlockRun(SHARED, 1, 0, 2, (1,))] * 2
    assert found.count(BlockRun(PRIVATE, 1, 0, 1)) == found.count(BlockRun(PRIVATE, 1, 1, 1)) == 1
    event = harness.scheduler.block_event(7)
    assert (event.now_ns, event.step_id) == (7, harness.plans[-1].step_id)
    assert [request_id for request_id, _ in event.tables] == [0, 1]
