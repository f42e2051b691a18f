"""The invariants of a scheduler, stated as assertions; for tests and the simulator, never on the hot path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everystop.core.plan import StepPlan
from everystop.core.request import Request, RequestState

if TYPE_CHECKING:
    from everystop.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that blocks, slots, groups, progress counts and plans on their way agree with each other."""
    batch, requests, siblings = scheduler.batch, scheduler.requests, scheduler.roster.siblings
    _check_blocks(scheduler)
    slots = [r.slot for r in batch.running.values()] + list(batch.held) + batch.free_slots
    assert sorted(slots) == list(range(scheduler.limits.max_num_seqs)), "a slot is lost or taken twice"
    parked = [request.request_id for _, request in siblings.parked()]
    assert len(set(parked)) == len(parked) == siblings.num_parked, "a request is parked twice, or not counted"
    assert all(leader_id in batch.running for leader_id in siblings.leader_ids())
    assert sorted(r.request_id for r in siblings.members()) == sorted(requests)
    for request in requests.values():
        _check_request(request, running=request.request_id in batch.running, parked=request.request_id in parked)
        assert request.num_computed_tokens + request.num_in_flight <= len(request.block_table) * batch.kv.block_size
    for outstanding in batch.outstanding:
        _check_plan(scheduler, outstanding.plan)


def _check_blocks(scheduler: Scheduler) -> None:
    references: dict[int, int] = {}
    batch = scheduler.batch
    tables = [request.block_table for request in (*scheduler.requests.values(), *batch.held.values())]
    tables += [table for outstanding in batch.outstanding for _, table in outstanding.deferred]
    for table in tables:
        for block in table:
            references[block] = references.get(block, 0) + 1
    batch.kv.pool.check_integrity(references)


def _check_request(request: Request, *, running: bool, parked: bool) -> None:
    assert running == (request.state is RequestState.RUNNING)
    assert parked == (request.state is RequestState.FORKING)
    assert running or not request.block_table
    assert request.num_remaining >= 0
    assert running or request.num_computed_tokens == request.num_in_flight == 0
    assert request.num_planned_scores <= request.num_scored_tokens
    assert not request.is_scoring or request.num_scheduled_through <= request.num_planned_scores, "a score is skipped"


def _check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    ids = [row.request_id for row in plan.rows]
    assert len(set(ids)) == len(ids), "a request is scheduled twice in a step"
    assert not set(ids) & set(plan.preempted), "a request is both preempted and scheduled"
    assert all(row.num_tokens > 0 for row in plan.rows)
    assert plan.num_tokens <= scheduler.limits.max_num_batched_tokens
    where = {row.request_id: (row.start, row.start + row.num_tokens) for row in plan.rows}
    for request_id, start, num_tokens in plan.prompt_logits:
        first, end = where[request_id]
        assert first <= start < start + num_tokens <= end, "logits are wanted of tokens that are not computed"
    cap = scheduler.limits.max_num_prefill_tokens
    assert cap is None or sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) <= cap
