"""Ratios and their intervals."""

from __future__ import annotations

import math
import random

import pytest

from everystop.observe.ratios import mean_ratio, paired_ratio, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]
)
def test_quantiles_of_student_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("degrees", "expected"), [(1, 63.657), (4, 4.604), (9, 3.250)])
def test_quantiles_of_another_confidence_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees, 0.99) == pytest.approx(expected, abs=5e-4)


def test_a_ratio_is_the_geometric_mean_of_its_pairs() -> None:
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    assert ratio is not None
    assert ratio.mean == pytest.approx(4.0)
    assert ratio.values == (2.0, 8.0)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low * ratio.high == pytest.approx(16.0)
    assert not ratio.is_decided


def test_equal_ratios_have_an_interval_of_no_width_and_one_alone_has_none() -> None:
    ratio = paired_ratio([3.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    assert ratio is not None
    assert ratio.low == pytest.approx(3.0)
    assert ratio.high == pytest.approx(3.0)
    assert ratio.is_above_one
    alone = mean_ratio([0.5])
    assert (alone.low, alone.high, alone.is_decided) == (None, None, False)


def test_figures_that_have_no_ratio_give_none() -> None:
    assert paired_ratio([], []) is None
    assert paired_ratio([1.0], [0.0]) is None
    assert paired_ratio([math.nan], [1.0]) is None


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    rng = random.Random(5)
    num_held = 0
    for _ in range(2000):
        ratio = mean_ratio([2.0 * math.exp(rng.gauss(0, 0.1)) for _ in range(5)])
        assert ratio.low is not None
        assert ratio.high is not None
        num_held += ratio.low <= 2.0 <= ratio.high
    assert 0.93 < num_held / 2000 < 0.97


def test_noise_that_meets_both_of_a_pair_leaves_the_interval_narrow() -> None:
    rng = random.Random(6)
    moments = [math.exp(rng.gauss(0, 0.5)) for _ in range(5)]
    ratio = paired_ratio([3 * moment for moment in moments], moments)
    assert ratio is not None
    assert ratio.low == pytest.approx(3.0)
