"""Step times measured at start-up: of a runner whose times are known, and of the native one, which stays as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.runner.models import make_runner, random_model

from everystop.core.plan import Admitted, StepPlan, StepResult
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.core.step_time import StepFeatures, StepTimeModel
from everystop.runner.calibration import Room, measure_step_times
from everystop.runner.simulated import SimulatedRunner

MACHINE = StepTimeModel(step_ns=5_000_000, token_ns=400_000, row_ns=20_000)


def execute_ns(plan: StepPlan) -> int:
    return round(MACHINE.execute_ns(StepFeatures.of(plan)))


def room(**limits: int) -> Room:
    return Room(**({"num_blocks": 64, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 256} | limits))


def known_times() -> SimulatedRunner:
    return SimulatedRunner(execute_ns, lambda ns: None)


def test_finds_the_times_of_a_machine() -> None:
    model = measure_step_times(known_times(), room())
    for features in (StepFeatures(1, 1, 0, 1), StepFeatures(16, 16, 0, 16), StepFeatures(80, 0, 3240, 1)):
        assert model.execute_ns(features) == pytest.approx(MACHINE.execute_ns(features), rel=0.05)


class Held(SimulatedRunner):
    """Every third step takes ten times as long."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if plan.rows and next(self.turns) % 3 == 0:
            result.execute_ns *= 10
        return result

    turns: Iterator[int] = iter(range(1_000))


def test_a_step_that_was_held_up_does_not_count() -> None:
    model = measure_step_times(Held(execute_ns, lambda ns: None), room())
    features = StepFeatures(16, 16, 0, 16)
    assert model.execute_ns(features) == pytest.approx(MACHINE.execute_ns(features), rel=0.05)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"num_blocks": 1},
        {"num_blocks": 2, "block_size": 16},
    ],
)
def test_stays_within_the_smallest_limits(limits: dict[str, int]) -> None:
    plans: list[StepPlan] = []
    given = room(**limits)
    runner = SimulatedRunner(lambda plan: plans.append(plan) or execute_ns(plan), lambda ns: None)  # type: ignore[func-returns-value]
    measure_step_times(runner, given)
    assert plans
    for plan in plans:
        assert plan.num_tokens <= given.max_num_batched_tokens
        assert len(plan.admitted) <= given.max_num_seqs
        tables = [block for admitted in plan.admitted for block in admitted.block_table]
        assert len(set(tables)) == len(tables)
        assert all(0 <= block < given.num_blocks for block in tables)
        for admitted in plan.admitted:
            assert len(admitted.token_ids) <= len(admitted.block_table) * given.block_size


def answer(measure: bool) -> list[tuple[int, ...] | str]:
    runner = make_runner(random_model("llama", "int8"), num_blocks=16, block_size=16, max_num_batched_tokens=64)
    if measure:
        times = measure_step_times(
            runner, Room(num_blocks=16, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
        )
        assert times.execute_ns(StepFeatures(8, 8, 0, 8)) > 0
    params = SamplingParams(temperature=0.0)
    prompt = tuple(range(4, 40))
    admitted = Admitted(0, prompt, len(prompt), params, 0, (), (0, 1, 2), 0, "")
    rows = [*runner.execute(StepPlan(0, [Row(0, 0, 36, 0, 35)], admitted=[admitted])).rows]
    for i in range(4):
        rows += runner.execute(StepPlan(1 + i, [Row(0, 36 + i, 1, 0, 0)])).rows
    runner.close()
    return rows


def test_leaves_the_native_runner_as_it_was() -> None:
    assert answer(measure=True) == answer(measure=False)
