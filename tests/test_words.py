"""Numbers, durations and lists as text."""

from __future__ import annotations

import pytest

from everystop.words import duration, in_time, listed, percent, significant


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (12.345, "12.3 s"),
        (0.0123, "12.3 ms"),
        (0.05, "50.0 ms"),
        (4.2e-6, "4.20 µs"),
        (-0.0123, "-12.3 ms"),
        (9.994e-3, "9.99 ms"),
        (9.996e-3, "10.0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (0.9996e-3, "1.00 ms"),
        (1234.5, "1,234 s"),
        (float("nan"), "–"),
        (float("inf"), "–"),
    ],
)
def test_figures_have_three_digits_and_never_round_into_the_next_unit(seconds: float, text: str) -> None:
    assert in_time(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.05, "50 ms"), (0.2, "200 ms"), (1.0, "1 s"), (0.0412, "41.2 ms"), (0, "0 s"), (2e3, "2,000 s")],
)
def test_what_is_said_has_no_zeros_that_nobody_said(seconds: float, text: str) -> None:
    assert in_time(seconds, is_said=True) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 µs"),
        (999_400, "999 µs"),
        (999_600, "1.0 ms"),
        (9_940_000, "9.9 ms"),
        (9_960_000, "10 ms"),
        (999_400_000, "999 ms"),
        (999_600_000, "1.0 s"),
        (119_900_000_000, "119.9 s"),
        (125_400_000_000, "2 min 5 s"),
    ],
)
def test_durations_in_prose_are_short_and_never_round_into_the_next_unit(ns: int, text: str) -> None:
    assert duration(ns) == text


def test_numbers_and_lists_read_well() -> None:
    assert [significant(v) for v in (12345.6, 0.012345, 0, 9.999, 99.96, 0.00099996)] == [
        "12,346", "0.0123", "0", "10.0", "100", "0.00100",
    ]  # fmt: skip
    assert [percent(v) for v in (0, 0.001, 0.456)] == ["0 %", "<1 %", "46 %"]
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
