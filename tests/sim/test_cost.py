"""Step times: what a plan costs, and coefficients found again from times that they made."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from everystop.core.plan import Row, StepPlan
from everystop.core.step_time import StepFeatures
from everystop.sim.cost import CostError, CostModel, TimedStep, fit, fit_line

MODEL = CostModel(
    step_ns=5e6, token_ns=20_000, decode_context_ns=30, prefill_pair_ns=2, row_ns=4_000, host_ns=1_000, source="here"
)


def make_steps(num: int, noise: float = 0.0, *, seed: int = 1) -> list[TimedStep]:
    """Steps of random plans, timed by `MODEL`."""
    dice = Random(seed)
    steps = []
    for _ in range(num):
        rows = [Row(i, dice.randrange(2000), 1, 0, 0) for i in range(dice.randint(1, 60))]
        rows += [Row(99, dice.randrange(1000), dice.randint(2, 200), 0, 0)] * dice.randint(0, 2)
        features = StepFeatures.of(StepPlan(0, rows))
        time_ns = round(MODEL.execute_ns(features) * (1 + dice.uniform(-noise, noise)))
        steps.append(TimedStep(features, time_ns, dice.randint(900, 1_100)))
    return steps


def test_features_count_contexts_and_pairs() -> None:
    """A decode at position 9 attends to 10 tokens; 3 tokens from position 4 on attend to 5 + 6 + 7."""
    plan = StepPlan(0, [Row(0, 9, 1, 0, 0), Row(1, 4, 3, 0, 3)])
    assert StepFeatures.of(plan) == (4, 10, 18, 2)
    assert MODEL.plan_ns(plan) == 5_000_000 + 4 * 20_000 + 10 * 30 + 18 * 2 + 2 * 4_000 + 1_000


def test_plan_without_rows_takes_no_time() -> None:
    assert MODEL.plan_ns(StepPlan(0, released=[1])) == 0
    assert CostModel().plan_ns(StepPlan(0, [Row(0, 0, 1, 0, 0)])) == 1, "time must go on"


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    fitted = fit(make_steps(200))
    for name in ("step_ns", "token_ns", "decode_context_ns", "prefill_pair_ns", "row_ns"):
        assert getattr(fitted.model, name) == pytest.approx(getattr(MODEL, name), rel=0.01), name
    assert fitted.model.host_ns == pytest.approx(1_000, rel=0.05)
    assert (fitted.num_steps, fitted.num_held_out) == (160, 40)
    assert fitted.p90_error < 1e-4


def test_fit_states_errors_on_steps_it_has_not_seen() -> None:
    fitted = fit(make_steps(400, noise=0.2))
    assert 0.05 < fitted.median_error < 0.15 < fitted.p90_error < 0.25
    assert abs(fitted.total_error) < 0.05


def test_errors_see_a_machine_that_became_slower() -> None:
    steps = make_steps(100)
    slower = [step._replace(execute_ns=2 * step.execute_ns) for step in steps[80:]]
    fitted = fit(steps[:80] + slower)
    assert fitted.total_error == pytest.approx(-0.5, abs=0.01)


def test_no_coefficient_is_negative() -> None:
    steps = [step._replace(execute_ns=10_000_000 - 1_000 * step.features.num_tokens) for step in make_steps(100)]
    model = fit_line(steps)
    numbers = (model.step_ns, model.token_ns, model.decode_context_ns, model.prefill_pair_ns, model.row_ns)
    assert min(numbers) == 0 < model.step_ns < 10_000_000


def test_steps_that_are_all_alike_can_be_fitted() -> None:
    model = fit_line([TimedStep(StepFeatures(4, 400, 0, 4), 1_000)] * 30)
    assert model.execute_ns(StepFeatures(4, 400, 0, 4)) == pytest.approx(1_000, rel=1e-3)
    assert fit_line([]) == CostModel()


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(CostError, match="19 steps are too few"):
        fit(make_steps(19))


def test_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    MODEL.write(tmp_path / "made" / "cost.json")
    assert CostModel.read(tmp_path / "made" / "cost.json") == MODEL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no cost model of version 1"),
        ('{"everystop_cost": 2}', "no cost model of version 1"),
        ('{"everystop_cost": 1, "tokens": 3}', "sets 'tokens'"),
        ('{"everystop_cost": 1, "token_ns": -3}', "token_ns is -3"),
        ('{"everystop_cost": 1, "token_ns": NaN}', "token_ns is nan"),
        ('{"everystop_cost": 1, "token_ns": "3"}', "token_ns is '3'"),
    ],
)
def test_file_that_is_no_model_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(CostError, match=message):
        CostModel.read(tmp_path / "cost.json")


def test_absent_model_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="everystop calibrate"):
        CostModel.read(tmp_path / "cost.json")
