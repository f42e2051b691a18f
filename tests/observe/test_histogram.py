"""Histograms and the bounds of their buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from everystop.core.durations import NS_PER_S
from everystop.observe import buckets
from everystop.observe.histogram import Histogram, geometric, merged, one_two_five


def test_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0, 1, 2, 2, 3, 5):
        histogram.add(value)
    assert histogram.cumulative() == [("1", 2.0), ("2", 4.0), ("4", 5.0), ("+Inf", 6.0)]
    assert (histogram.total, histogram.num) == (13, 6)


def test_nanoseconds_sum_up_exactly_in_any_order() -> None:
    values = [10**15 + 1, 1, 3, 10**12 + 7] * 50
    one, other = Histogram((1.0,), NS_PER_S), Histogram((1.0,), NS_PER_S)
    for value in values:
        one.add(value)
    for value in sorted(values):
        other.add(value)
    assert one.sum == other.sum == sum(values)
    assert one.total == other.total


def test_a_bound_is_met_to_the_nanosecond() -> None:
    histogram = Histogram((0.1, 0.3), NS_PER_S)
    histogram.add(100_000_000)
    histogram.add(300_000_001)
    assert histogram.counts == [1, 0, 1]


def test_several_equal_values_are_one_addition() -> None:
    histogram = Histogram((1, 2))
    histogram.add(2, 5)
    assert (histogram.counts, histogram.sum) == ([0, 5, 0], 10)


def test_some_of_the_bounds_hold_the_same_counts() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (1, 2, 3, 9):
        histogram.add(value)
    assert histogram.cumulative((2.0, 4.0)) == [("2.0", 2.0), ("4.0", 3.0), ("+Inf", 4.0)]
    with pytest.raises(KeyError):
        histogram.cumulative((3.0,))


def test_bounds_are_made_and_merged() -> None:
    assert geometric(0.001, 0.01, ratio=2) == [0.001, 0.002, 0.004, 0.008]
    assert merged((0.1, 1.0), (0.05, 0.095, 0.5)) == (0.05, 0.1, 0.5, 1.0)
    assert one_two_five(60) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    assert one_two_five(0) == ()


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (buckets.TTFT_S, buckets.VLLM_TTFT_S),
        (buckets.ITL_S, buckets.VLLM_ITL_S),
        (buckets.LATENCY_S, buckets.VLLM_LATENCY_S),
        (buckets.STEP_TOKENS, buckets.VLLM_STEP_TOKENS),
    ],
)
def test_own_bounds_hold_those_of_vllm(own: tuple[float, ...], theirs: tuple[float, ...]) -> None:
    assert set(theirs) <= set(own)
    assert list(own) == sorted(set(own))


@pytest.mark.parametrize("own", [buckets.TTFT_S, buckets.ITL_S, buckets.LATENCY_S, buckets.STEP_S])
def test_own_bounds_are_fine_below_300_ms(own: tuple[float, ...]) -> None:
    fine = [bound for bound in own if 0.001 <= bound <= 0.3]
    assert all(b / a < 1.61 for a, b in pairwise(fine))
