"""Counts and quantiles of the last minute, against sorting all values."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystop.core.durations import NS_PER_S
from everystop.observe.recent import RecentSum, RecentValues, bin_of, middle_of

SHARES = (0.0, 0.5, 0.95, 0.99, 1.0)


@given(st.integers(0, 2**62))
def test_a_bin_is_narrow_and_bins_are_in_order(value: int) -> None:
    assert abs(middle_of(bin_of(value)) - value) <= value / 100
    assert bin_of(value) <= bin_of(value + 1)


def test_small_values_are_exact() -> None:
    assert [middle_of(bin_of(value)) for value in range(128)] == list(range(128))


def test_quantiles_are_those_of_the_last_minute_within_one_in_a_hundred() -> None:
    rng, recent, kept = random.Random(1), RecentValues(), []
    for now_s in range(200):
        values = [int(rng.lognormvariate(17, 1.5)) for _ in range(rng.choice([0, 1, 30]))]
        kept += [(now_s, value) for value in values]
        recent.add(now_s * NS_PER_S + 5, Counter(values))
        ordered = sorted(value for second, value in kept if second > now_s - 60)
        exact = [ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None for share in SHARES]
        for found, expected in zip(recent.quantiles(now_s * NS_PER_S + 9, SHARES), exact, strict=True):
            assert found == (None if expected is None else pytest.approx(expected, rel=0.01))
    assert recent.quantiles(300 * NS_PER_S, SHARES) == [None] * 5
    assert not recent._total


def test_sums_are_those_of_the_last_minute() -> None:
    rng, recent, kept = random.Random(2), RecentSum(), []
    for now_s in range(150):
        num = rng.randrange(100)
        kept.append(num)
        recent.add(now_s * NS_PER_S, num)
        recent.add(now_s * NS_PER_S + 7, 1)
        assert recent.total(now_s * NS_PER_S) == sum(kept[-60:]) + min(60, now_s + 1)
    assert recent.total(500 * NS_PER_S) == 0
