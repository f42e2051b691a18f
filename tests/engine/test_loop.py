"""The step loop: what a turn does at depth 0 and 1; engine, simulator and replay get the same plans from it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.harness import Harness, make_request, make_scheduler
from tests.core.hash_model import EOS, HashModelRunner

from everystop.core.events import FinishEvent, StepEvent
from everystop.core.plan import StepPlan, StepResult
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop, Turn
from everystop.runner.simulated import FILLER_TOKEN, SimulatedRunner


class Clock:
    """Virtual nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 0

    def advance(self, ns: int) -> None:
        self.now_ns += ns


def make_loop(depth: int = 0, **fields: Any) -> tuple[StepLoop, Scheduler, Clock, list[StepPlan]]:
    """A loop over a simulated runner with steps of 1 µs a token, its scheduler, clock and the plans it executed."""
    clock, plans = Clock(), []
    scheduler = make_scheduler(**fields)

    def step_ns(plan: StepPlan) -> int:
        plans.append(plan)
        return 1_000 * plan.num_tokens

    runner = SimulatedRunner(step_ns, clock.advance)
    return StepLoop(scheduler, runner, lambda: clock.now_ns, depth=depth), scheduler, clock, plans


def run(loop: StepLoop, scheduler: Scheduler) -> list[Turn]:
    turns = []
    while scheduler.has_work:
        turns.append(loop.turn())
    turns.append(loop.turn())
    return turns


def test_turn_without_work_is_idle() -> None:
    loop, _, clock, plans = make_loop()
    turn = loop.turn()
    assert turn.is_idle
    assert turn.wake_at_ns is None
    assert (turn.events, plans, clock.now_ns) == ([], [], 0)


def test_depth_zero_takes_each_result_back_in_its_own_turn() -> None:
    loop, scheduler, _, plans = make_loop()
    scheduler.add(make_request(0, 5, max_tokens=3), 0)
    turns = run(loop, scheduler)
    assert [turn.plan.step_id for turn in turns if turn.plan is not None] == [plan.step_id for plan in plans]
    assert [sum(isinstance(e, StepEvent) for e in turn.events) for turn in turns] == [1, 1, 1, 1, 0]


def test_depth_one_plans_the_next_step_before_it_takes_the_last_one_back() -> None:
    loop, scheduler, _, plans = make_loop(depth=1)
    scheduler.add(make_request(0, 5, max_tokens=3), 0)
    first, second = loop.turn(), loop.turn()
    assert not first.is_idle
    assert not any(isinstance(e, StepEvent) for e in first.events)
    (event,) = [e for e in second.events if isinstance(e, StepEvent)]
    assert event.plan is plans[0]
    assert len(plans) == 2
    run(loop, scheduler)


@pytest.mark.parametrize("depth", [0, 1])
def test_results_come_back_in_the_order_of_their_plans(depth: int) -> None:
    loop, scheduler, _, plans = make_loop(depth, max_num_batched_tokens=16)
    for i in range(5):
        scheduler.add(make_request(i, 20, max_tokens=6), 0)
    turns = run(loop, scheduler)
    events = [e for turn in turns for e in turn.events if isinstance(e, StepEvent)]
    assert [e.plan.step_id for e in events] == [plan.step_id for plan in plans][: len(events)]
    assert len(plans) - len(events) <= depth


def test_times_of_a_step_are_those_of_its_own_calls() -> None:
    loop, scheduler, _, _ = make_loop()
    scheduler.add(make_request(0, 5, max_tokens=2), 0)
    events = [e for turn in run(loop, scheduler) for e in turn.events if isinstance(e, StepEvent)]
    assert [(e.scheduled_ns, e.execute_ns, e.now_ns) for e in events[:2]] == [
        (0, 5_000, 5_000),
        (5_000, 1_000, 6_000),
    ]


def test_waiting_policy_says_when_to_come_back() -> None:
    loop, scheduler, clock, _ = make_loop(policy="static", max_num_seqs=4, batch_wait_ns=7_000)
    scheduler.add(make_request(0, 5, max_tokens=1), 0)
    turn = loop.turn()
    assert turn.is_idle
    assert turn.wake_at_ns == 7_000
    clock.advance(7_000)
    assert not loop.turn().is_idle


def test_inspector_sees_each_result_before_the_scheduler_and_may_stop_a_request() -> None:
    seen = []

    def inspect(plan: StepPlan, result: StepResult) -> None:
        seen.append((plan.step_id, result.rows))
        if plan.step_id == 2:
            result.stopped[0] = "END"

    scheduler = make_scheduler()
    runner = SimulatedRunner(lambda plan: 1, lambda ns: None)
    loop = StepLoop(scheduler, runner, lambda: 0, inspect=inspect)
    scheduler.add(make_request(0, 5, max_tokens=50), 0)
    events = [e for turn in run(loop, scheduler) for e in turn.events]
    (end,) = [e for e in events if isinstance(e, FinishEvent)]
    assert (end.reason, end.detail, end.num_output_tokens) == ("stop", "END", 3)
    assert seen[:3] == [(i, [(FILLER_TOKEN,)]) for i in range(3)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["continuous", "static", "static-padded"])
def test_simulator_makes_the_plans_of_the_real_run(policy: str, depth: int) -> None:
    """The hash model's tokens and filler give the same plans where nobody stops early: the scheduler reads no token."""

    def plans_of(simulated: bool) -> list[str]:
        scheduler = make_scheduler(
            policy=policy, num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=12, prefix_caching=False
        )
        plans: list[StepPlan] = []
        runner = (
            SimulatedRunner(lambda plan: plans.append(plan) or 1, lambda ns: None)  # type: ignore[func-returns-value]
            if simulated
            else HashModelRunner(num_blocks=14, block_size=4, before_execute=plans.append)
        )
        loop = StepLoop(scheduler, runner, lambda: 0, depth=depth)
        for i in range(9):
            scheduler.add(make_request(i, 3 + i, max_tokens=30 - i, n=1), 0)
        run(loop, scheduler)
        assert any(plan.preempted for plan in plans)
        return [plan.fingerprint() for plan in plans]

    assert plans_of(simulated=True) == plans_of(simulated=False)


def serve_all(depth: int, *, is_late: bool) -> Harness:
    """Nine requests with stops and end tokens in a tight pool, to their end."""
    scheduler = make_scheduler(num_blocks=14, block_size=4, max_num_seqs=4, max_num_batched_tokens=12)
    harness = Harness(scheduler, depth=depth, is_late=is_late)
    for i in range(9):
        fields = {"stop": ("s",)} if i % 2 else {"eos_token_ids": (EOS,)}
        harness.add(make_request(i, 3 + i, max_tokens=30, temperature=1.0, seed=i, **fields))
    harness.run()
    return harness


def test_runner_that_is_one_step_behind_gives_every_client_the_same() -> None:
    """Each stop is found a step late: that row is computed in vain, is counted, and reaches nobody."""
    one_by_one, ahead = serve_all(0, is_late=False), serve_all(1, is_late=True)
    assert ahead.received == one_by_one.received
    assert {i: e.reason for i, e in ahead.finished.items()} == {i: e.reason for i, e in one_by_one.finished.items()}
    num_stopped = sum(event.reason == "stop" for event in ahead.finished.values())
    assert num_stopped > 3
    assert one_by_one.counts["wasted rows"] == 0
    assert 0 < ahead.counts["wasted rows"] <= num_stopped


def test_next_step_is_launched_before_the_last_one_is_waited_for() -> None:
    calls: list[str] = []

    class Step:
        def __init__(self, plan: StepPlan) -> None:
            self.plan = plan

        def wait(self) -> StepResult:
            calls.append(f"wait {self.plan.step_id}")
            return StepResult([(FILLER_TOKEN,) for _ in self.plan.rows])

    class Runner(SimulatedRunner):
        def launch(self, plan: StepPlan) -> Step:
            calls.append(f"launch {plan.step_id}")
            return Step(plan)

    for depth, expected in ((0, ["launch 0", "wait 0", "launch 1"]), (1, ["launch 0", "launch 1", "wait 0"])):
        calls.clear()
        scheduler = make_scheduler()
        loop = StepLoop(scheduler, Runner(lambda plan: 1, lambda ns: None), lambda: 0, depth=depth)
        scheduler.add(make_request(0, 5, max_tokens=3), 0)
        run(loop, scheduler)
        assert calls[:3] == expected
        assert calls[-1].startswith("wait")
