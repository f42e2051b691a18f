"""Coefficients found again from times that they made, also where other programs held steps up."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from everystop.core.plan import StepPlan
from everystop.core.rows import Row
from everystop.core.step_time import StepFeatures, StepTimeModel
from everystop.sim.cost import CostError, CostModel
from everystop.sim.fit import PRIOR, TimedStep, fit, fit_line

MODEL = CostModel(
    step_ns=5e6, token_ns=20_000, decode_context_ns=30, prefill_pair_ns=2, row_ns=4_000, host_ns=1_000, source="here"
)
NAMES = ("step_ns", "token_ns", "decode_context_ns", "prefill_pair_ns", "row_ns")


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


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    fitted = fit(make_steps(200))
    for name in NAMES:
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


def hold_up(steps: list[TimedStep], share: float, *, seed: int = 2) -> list[TimedStep]:
    """So many of the steps, chosen by chance, take two to ten times as long."""
    dice = Random(seed)
    factors = [dice.uniform(2, 10) if dice.random() < share else 1.0 for _ in steps]
    return [step._replace(execute_ns=round(step.execute_ns * x)) for step, x in zip(steps, factors, strict=True)]


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_steps_that_were_held_up_do_not_bend_the_fit(share: float) -> None:
    fitted = fit(hold_up(make_steps(500, noise=0.05), share) + make_steps(125, seed=9))
    assert abs(fitted.total_error) < 0.01
    assert fitted.p90_error < 0.02
    assert fitted.model.host_ns + 30 * fitted.model.host_row_ns == pytest.approx(1_000, rel=0.05)
    assert fitted.held_up_share == pytest.approx(share, abs=0.04)


def test_least_squares_would_have_been_bent() -> None:
    steps = hold_up(make_steps(500, noise=0.05), 0.3)
    rows = [[1, *step.features] for step in steps]
    plain, *_ = np.linalg.lstsq(np.array(rows, float), np.array([step.execute_ns for step in steps], float))
    true = np.array([MODEL.execute_ns(step.features) for step in steps])
    assert (np.array(rows) @ plain).sum() / true.sum() > 1.5


def test_noise_on_every_step_is_not_taken_for_held_up() -> None:
    assert fit(make_steps(400, noise=0.2)).held_up_share == 0


def test_one_long_step_held_up_does_not_set_the_time_of_prompts() -> None:
    """The only step with a long prompt took ten times its time: the others outweigh it."""
    plan = StepPlan(0, [Row(0, 0, 512, 0, 511)])
    features = StepFeatures.of(plan)
    late = TimedStep(features, round(10 * MODEL.execute_ns(features)))
    model = fit_line([*make_steps(200, noise=0.02), late])
    assert model.execute_ns(features) == pytest.approx(MODEL.execute_ns(features), rel=0.05)


def test_what_the_steps_do_not_tell_comes_from_the_prior_in_proportion() -> None:
    """Steps of decodes alone, by a machine ten times as fast as the prior's: prompts are guessed to be so, too."""
    dice = Random(3)
    steps = []
    for _ in range(100):
        num_rows = dice.randint(1, 40)
        features = StepFeatures(num_rows, num_rows * dice.randint(10, 1_000), 0, num_rows)
        steps.append(TimedStep(features, round(PRIOR.execute_ns(features) / 10)))
    assert fit_line(steps).prefill_pair_ns == pytest.approx(PRIOR.prefill_pair_ns / 10, rel=0.01)


def test_what_the_server_measured_when_it_started_is_the_better_guess() -> None:
    """It ran on a quieter machine, three times as fast as now."""
    start_up = StepTimeModel(step_ns=2e6, token_ns=7_000, decode_context_ns=9, prefill_pair_ns=5, row_ns=1_000)
    steps = [
        TimedStep(f, round(3 * start_up.execute_ns(f))) for f in (StepFeatures(n, 50 * n, 0, n) for n in range(1, 40))
    ]
    assert fit_line(steps, start_up).prefill_pair_ns == pytest.approx(15, rel=0.01)


def test_host_includes_what_it_waits_for_http_but_not_one_long_stop() -> None:
    """A gap in ten is 4 ms longer, and once a second passes: 600 µs on average."""
    dice = Random(4)
    waits = [4_000_000 * (dice.random() < 0.1) for _ in range(400)]
    steps = [step._replace(host_ns=200_000 + wait) for step, wait in zip(make_steps(400), waits, strict=True)]
    steps[7] = steps[7]._replace(host_ns=10**9)
    model = fit_line(steps)
    assert model.host_ns + 30 * model.host_row_ns == pytest.approx(200_000 + sum(waits) / 400, rel=0.1)


def test_host_grows_with_the_rows() -> None:
    steps = [step._replace(host_ns=200_000 + 5_000 * step.features.num_rows) for step in make_steps(200)]
    model = fit_line(steps)
    assert model.host_ns == pytest.approx(200_000, rel=0.01)
    assert model.host_row_ns == pytest.approx(5_000, rel=0.01)
