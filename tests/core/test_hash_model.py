"""The hash model is an oracle only if every kind of damage to a plan or to the cache changes its output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.core.harness import Harness, make_request, make_scheduler
from tests.core.hash_model import HashModelRunner, solo

from everystop.core.plan import StepPlan
from everystop.core.request import FinishReason, SamplingParams
from everystop.core.rows import Rows
from everystop.runner import Launched


def harness_with(damage: Callable[[StepPlan], None], *, prefix_caching: bool = False) -> Harness:
    """A harness whose plans are damaged on their way to the runner."""
    scheduler = make_scheduler(block_size=4, prefix_caching=prefix_caching, max_num_batched_tokens=8)
    harness = Harness(scheduler, is_checking=False)
    launch = harness.loop._launch

    def damaged_launch(plan: StepPlan) -> Launched:
        damage(plan)
        return launch(plan)

    harness.loop._launch = damaged_launch
    return harness


def test_lone_request_yields_what_the_oracle_says() -> None:
    harness = Harness(make_scheduler())
    harness.add(make_request(0, 20, max_tokens=10, temperature=1.0, seed=3))
    harness.run()
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
    assert solo(range(20), params, limit_tokens=99).token_ids == harness.output(0)


def test_oracle_depends_on_every_token_seed_choice_and_position() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    reference = solo([1, 2, 3, 4], params, limit_tokens=99).token_ids
    others = [
        solo([9, 2, 3, 4], params, limit_tokens=99),
        solo([1, 2, 4, 3], params, limit_tokens=99),
        solo([1, 2, 3, 4, 5], params, limit_tokens=99),
        solo([1, 2, 3, 4], params, limit_tokens=99, choice_index=1),
        solo([1, 2, 3, 4], SamplingParams(max_tokens=20, temperature=1.0, seed=4), limit_tokens=99),
        solo([1, 2, 3, 4], SamplingParams(max_tokens=20, temperature=0.0), limit_tokens=99),
    ]
    assert all(other.token_ids != reference for other in others)
    assert all(other.reason is FinishReason.LENGTH for other in others)


def swap_two_blocks(plan: StepPlan) -> None:
    plan.admitted[:] = [
        a._replace(block_table=(a.block_table[1], a.block_table[0], *a.block_table[2:])) if plan.step_id > 3 else a
        for a in plan.admitted
    ]


def put_a_foreign_block(plan: StepPlan) -> None:
    if plan.step_id > 0:
        plan.admitted[:] = [a._replace(block_table=(0, *a.block_table[1:])) for a in plan.admitted]


def skip_copies(plan: StepPlan) -> None:
    plan.copies.clear()


def skip_new_blocks_after_the_first(plan: StepPlan) -> None:
    plan.new_blocks[:] = [new._replace(block_ids=(0,)) for new in plan.new_blocks]


def start_one_token_late(plan: StepPlan) -> None:
    plan.rows = Rows(
        row._replace(start=row.start + 1, num_tokens=row.num_tokens - 1, logits_from=row.logits_from - 1)
        if row.num_tokens > 1 and row.start > 0
        else row
        for row in plan.rows
    )


@pytest.mark.parametrize(
    "damage", [put_a_foreign_block, skip_copies, skip_new_blocks_after_the_first, start_one_token_late]
)
def test_damaged_plan_changes_the_output(damage: Callable[[StepPlan], None]) -> None:
    harness = harness_with(damage)
    harness.add(make_request(0, 11, max_tokens=20))
    harness.add_group(1, 14, 2, max_tokens=20, temperature=1.0, seed=1)
    with pytest.raises(AssertionError, match="diverged"):
        harness.run()


def test_shared_blocks_in_the_wrong_order_change_the_output() -> None:
    harness = harness_with(swap_two_blocks, prefix_caching=True)
    harness.add(make_request(0, list(range(11)), max_tokens=2))
    harness.run()
    harness.add(make_request(1, list(range(11)), max_tokens=20))
    with pytest.raises(AssertionError, match="diverged"):
        harness.run()


def test_hit_of_a_block_that_was_never_filled_changes_the_output() -> None:
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=8), is_checking=False)
    victim = harness.add(make_request(0, list(range(15)), max_tokens=2))
    harness.turn()
    harness.scheduler.kv.publish(victim, 12)  # of which 8 tokens are computed
    harness.abort(0)
    harness.add(make_request(1, list(range(15)), max_tokens=2))
    with pytest.raises(AssertionError, match="diverged"):
        harness.run()


def test_rows_of_a_step_see_what_other_rows_of_it_write() -> None:
    """All rows of a layer write before any attends: a prefix that is computed in the same step may be shared in it."""
    harness = Harness(make_scheduler(block_size=4, max_num_batched_tokens=64))
    harness.add(make_request(0, [*range(12), 50], max_tokens=5))
    harness.add(make_request(1, [*range(12), 60], max_tokens=5))
    harness.turn()
    assert [(row.request_id, row.start) for row in harness.plans[0].rows] == [(0, 0), (1, 12)]
    harness.run()


def test_state_is_dropped_with_its_request() -> None:
    runner = HashModelRunner(num_blocks=4, block_size=4)
    assert runner.known_requests == set()
    harness = Harness(make_scheduler())
    harness.add(make_request(0, 5, max_tokens=3))
    harness.turn()
    assert harness.runner.known_requests == {0}
    harness.run()
    assert harness.runner.known_requests == set()
