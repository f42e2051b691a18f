"""Steps planned by time: no longer than the target where it can be met, never without progress, the same on replay."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import make_request, make_scheduler

from everystop.core.budget import MIN_PREFILL_TOKENS
from everystop.core.events import Event, StepEvent
from everystop.core.policy import Continuous, View
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner

MS = 1_000_000
MACHINE = StepTimeModel(step_ns=5 * MS, token_ns=400_000, decode_context_ns=200, prefill_pair_ns=500, row_ns=20_000)


class Drive:
    """A scheduler on a machine of known step times, in virtual time."""

    def __init__(self, scheduler: Scheduler, *, depth: int = 0, noise: float = 0.0) -> None:
        self.now_ns = 0
        self.scheduler = scheduler
        self.steps: list[StepEvent] = []
        self._rng = random.Random(1)
        self._noise = noise
        runner = SimulatedRunner(
            lambda plan: round(MACHINE.execute_ns(StepFeatures.of(plan)) * self._rng.uniform(1, 1 + self._noise)),
            self._advance,
        )
        self._loop = StepLoop(scheduler, runner, lambda: self.now_ns, depth=depth)

    def _advance(self, ns: int) -> None:
        self.now_ns += ns

    def turn(self) -> list[Event]:
        events = self._loop.turn().events
        self.steps += [event for event in events if isinstance(event, StepEvent) and event.plan.rows]
        return events

    def run(self) -> None:
        while self.scheduler.has_work:
            self.turn()


def busy(
    target_ns: int | None, prior: StepTimeModel = MACHINE, *, depth: int = 0, noise: float = 0.0, **limits: int
) -> Drive:
    """Eight decoders, and long prompts that come in beside them."""
    drive = Drive(
        make_scheduler(
            num_blocks=2_000,
            block_size=32,
            max_num_seqs=12,
            max_num_batched_tokens=limits.pop("max_num_batched_tokens", 512),
            target_itl_ns=target_ns,
            step_times=prior,
            **limits,
        ),
        depth=depth,
        noise=noise,
    )
    for i in range(8):
        drive.scheduler.add(make_request(i, 4, max_tokens=400), 0)
    for _ in range(20):
        drive.turn()
    for i in range(8, 11):
        drive.scheduler.add(make_request(i, 1_800, max_tokens=20), drive.now_ns)
    return drive


def num_prefill(step: StepEvent) -> int:
    return sum(row.num_tokens for row in step.plan.rows if row.num_tokens > 1)


def mixed(steps: list[StepEvent]) -> list[StepEvent]:
    """Steps with decodes and prefill."""
    return [s for s in steps if len(s.plan.rows) > 4 and {1} < {min(row.num_tokens, 2) for row in s.plan.rows}]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prior", [MACHINE, UNKNOWN_STEP_TIMES])
@pytest.mark.parametrize("target_ms", [20, 40, 80])
def test_steps_keep_to_the_target_and_use_it_up(target_ms: int, prior: StepTimeModel, depth: int) -> None:
    drive = busy(target_ms * MS, prior, depth=depth)
    drive.run()
    steps = mixed(drive.steps)[6:-2]  # what the model does not know yet it learns from the first ones
    assert len(steps) >= 12
    assert all(step.execute_ns <= 1.1 * step.target_ns or num_prefill(step) <= MIN_PREFILL_TOKENS for step in steps)
    in_the_middle = [s.execute_ns for s in steps if not any(r.logits_from < r.num_tokens > 1 for r in s.plan.rows)]
    assert sorted(in_the_middle)[len(in_the_middle) // 2] >= 0.8 * target_ms * MS


def test_without_a_target_the_same_steps_are_as_long_as_the_tokens_allow() -> None:
    drive = busy(None)
    drive.run()
    assert max(step.execute_ns for step in drive.steps) > 200 * MS
    assert {step.target_ns for step in drive.steps} == {0}


def test_target_out_of_reach_is_said_and_prompts_still_progress() -> None:
    drive = busy(6 * MS)
    drive.run()
    steps = mixed(drive.steps)
    assert steps
    assert all(step.predicted_ns > step.target_ns == 6 * MS for step in steps)
    assert {num_prefill(step) for step in steps} <= set(range(1, MIN_PREFILL_TOKENS + 1))


def test_prediction_is_near_the_real_time() -> None:
    drive = busy(40 * MS, UNKNOWN_STEP_TIMES, noise=0.1)
    drive.run()
    off = sorted(abs(s.predicted_ns / s.execute_ns - 1) for s in drive.steps[30:])
    assert off[len(off) // 2] < 0.06


def test_limits_on_tokens_hold_beside_the_target() -> None:
    drive = busy(10_000 * MS, max_num_batched_tokens=64)
    drive.run()
    assert max(step.plan.num_tokens for step in drive.steps) == 64


class Hurried(Continuous):
    """A policy with a target of its own."""

    def step_target_ns(self, view: View) -> int | None:
        return 25 * MS


@pytest.mark.parametrize("target_ms", [None, 20, 60])
def test_the_stricter_of_the_two_targets_counts(target_ms: int | None) -> None:
    scheduler = make_scheduler(
        policy=Hurried(), step_times=MACHINE, target_itl_ns=None if target_ms is None else target_ms * MS
    )
    drive = Drive(scheduler)
    scheduler.add(make_request(0, 4, max_tokens=3), 0)
    drive.turn()
    drive.run()
    assert {step.target_ns for step in drive.steps[1:]} == {min(25, target_ms or 25) * MS}


def test_a_prompt_that_keeps_no_decoder_waiting_takes_all_tokens() -> None:
    scheduler = make_scheduler(
        step_times=MACHINE, target_itl_ns=20 * MS, num_blocks=100, max_num_batched_tokens=256, max_model_len=2_000
    )
    drive = Drive(scheduler)
    scheduler.add(make_request(0, 600, max_tokens=3), 0)
    drive.run()
    assert [step.plan.num_tokens for step in drive.steps] == [256, 256, 88, 1, 1]
    assert [step.target_ns for step in drive.steps] == [0, 0, 0, 20 * MS, 20 * MS]


def test_idle_time_is_not_taken_for_a_step() -> None:
    scheduler = make_scheduler(target_itl_ns=50 * MS, step_times=MACHINE)
    drive = Drive(scheduler)
    for i in range(30):
        scheduler.add(make_request(i, 8, max_tokens=4), drive.now_ns)
        drive.run()
        drive.turn()
        drive.now_ns += 10_000 * MS
    decode = StepFeatures(1, 10, 0, 1)
    assert scheduler.roster.view.step_times.execute_ns(decode) == pytest.approx(MACHINE.execute_ns(decode), rel=0.05)
