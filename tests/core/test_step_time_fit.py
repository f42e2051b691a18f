"""The step-time model learned from steps: right without noise, steady under it, and near its prior where nothing is
known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel, num_pairs
from everystop.core.step_time_fit import StepTimeFit

TRUE = StepTimeModel(step_ns=5_500_000, token_ns=350_000, decode_context_ns=300, prefill_pair_ns=900, row_ns=30_000)
PROBES = [(1, 0, 0), (32, 0, 0), (16, 64, 1_000), (32, 200, 0)]


def features(num_decodes: int, chunk: int, start: int, context: int = 300) -> StepFeatures:
    num_rows = num_decodes + (chunk > 0)
    return StepFeatures(num_decodes + chunk, num_decodes * context, num_pairs(start, chunk), num_rows)


def traffic(seed: int, num_steps: int) -> Iterator[StepFeatures]:
    rng = random.Random(seed)
    for _ in range(num_steps):
        chunk, start = rng.choice([0, 0, 0, 32, 64, 128]), rng.choice([0, 64, 512, 1024])
        yield features(rng.randint(1, 32), chunk, start, rng.randint(20, 600))


def errors(model: StepTimeModel) -> list[float]:
    return [model.execute_ns(features(*probe)) / TRUE.execute_ns(features(*probe)) - 1 for probe in PROBES]


@pytest.mark.parametrize("prior", [UNKNOWN_STEP_TIMES, StepTimeModel(step_ns=9_000_000, token_ns=200_000)])
def test_learns_the_true_times(prior: StepTimeModel) -> None:
    fit = StepTimeFit(prior)
    for step in traffic(1, 2_000):
        fit.observe(step, round(TRUE.execute_ns(step)))
    assert errors(fit.model) == pytest.approx([0] * 4, abs=0.02)


def test_steps_that_were_held_up_hardly_bend_it() -> None:
    fit, rng = StepTimeFit(UNKNOWN_STEP_TIMES), random.Random(2)
    for step in traffic(2, 2_000):
        fit.observe(step, round(TRUE.execute_ns(step) * (4 if rng.random() < 0.05 else rng.uniform(0.98, 1.02))))
    assert errors(fit.model) == pytest.approx([0] * 4, abs=0.03)


def test_prefill_is_not_forgotten_over_many_steps_without_it() -> None:
    fit = StepTimeFit(UNKNOWN_STEP_TIMES)
    for step in traffic(3, 500):
        fit.observe(step, round(TRUE.execute_ns(step)))
    for i in range(5_000):
        step = features(1 + i % 32, 0, 0)
        fit.observe(step, round(TRUE.execute_ns(step)))
    assert errors(fit.model) == pytest.approx([0] * 4, abs=0.05)


def test_follows_a_machine_that_becomes_half_as_fast() -> None:
    fit = StepTimeFit(TRUE)
    for step in traffic(4, 1_000):
        fit.observe(step, round(TRUE.execute_ns(step)))
    for step in traffic(5, 3_000):
        fit.observe(step, round(2 * TRUE.execute_ns(step)))
    assert errors(fit.model) == pytest.approx([1] * 4, abs=0.1)


def test_follows_a_machine_that_becomes_slow_after_long_exactness() -> None:
    """If the usual deviation became next to nothing, it would be long before a step that deviates counted."""
    fit = StepTimeFit(TRUE)
    step = features(4, 0, 0)
    for _ in range(4_000):
        fit.observe(step, round(TRUE.execute_ns(step)))
    for _ in range(700):
        fit.observe(step, round(2 * TRUE.execute_ns(step)))
    assert fit.model.execute_ns(step) == pytest.approx(2 * TRUE.execute_ns(step), rel=0.1)


def test_step_that_took_no_time_teaches_an_unknown_model_something() -> None:
    fit = StepTimeFit(UNKNOWN_STEP_TIMES)
    fit.observe(features(1, 0, 0), 0)
    assert fit.model.execute_ns(features(1, 0, 0)) == pytest.approx(1, rel=0.01)


def test_what_was_never_seen_stays_as_the_prior_has_it() -> None:
    fit = StepTimeFit(TRUE)
    for i in range(200):
        step = features(1 + i % 8, 0, 0)
        fit.observe(step, round(TRUE.execute_ns(step)))
    assert fit.model.prefill_pair_ns == TRUE.prefill_pair_ns
    assert errors(fit.model) == pytest.approx([0] * 4, abs=0.01)


def test_no_coefficient_is_negative() -> None:
    fit = StepTimeFit(UNKNOWN_STEP_TIMES)
    for i in range(64):
        fit.observe(features(1 + i % 8, 0, 0), 10_000_000 - 1_000_000 * (i % 8))  # more rows, less time
    model = fit.model
    assert min(model.step_ns, model.token_ns, model.decode_context_ns, model.prefill_pair_ns, model.row_ns) >= 0
    assert model.step_ns > 0


@pytest.mark.parametrize("start", [0, 1, 31, 500, 8_000])
@pytest.mark.parametrize("model", [TRUE, StepTimeModel(token_ns=1_000), StepTimeModel(prefill_pair_ns=7)])
def test_largest_chunk_is_the_largest_that_fits(model: StepTimeModel, start: int) -> None:
    for time_ns in (0.5, 29_000, 900_000, 12_345_678, 3e9):
        num_tokens = model.largest_chunk(start, time_ns)
        cost = [
            model.execute_ns(StepFeatures(n, 0, num_pairs(start, n), 1)) - model.step_ns
            for n in (num_tokens, num_tokens + 1)
        ]
        assert num_tokens == 0 or cost[0] <= time_ns * (1 + 1e-9)
        assert cost[1] > time_ns * (1 - 1e-9)
