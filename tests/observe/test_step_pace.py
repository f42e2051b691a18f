"""Which steps are slow, beside those with about as many rows."""

from __future__ import annotations

from everystop.observe.step_pace import LEAST, StepPace

MS = 10**6


def pace_of(*sizes: tuple[int, int]) -> StepPace:
    pace = StepPace()
    for num_rows, took_ns in sizes:
        for _ in range(LEAST):
            pace.add_decode(num_rows, took_ns)
    return pace


def test_nothing_is_slow_before_enough_was_seen() -> None:
    pace = StepPace()
    for _ in range(LEAST - 1):
        pace.add_decode(1, MS)
    assert not pace.is_slow(1, 100 * MS)
    pace.add_decode(1, MS)
    assert pace.is_slow(1, 100 * MS)


def test_more_than_twice_the_median_is_slow() -> None:
    pace = pace_of((1, 10 * MS))
    assert not pace.is_slow(1, 20 * MS)
    assert pace.is_slow(1, 20 * MS + 1)


def test_a_full_batch_is_not_slow_beside_a_single_row() -> None:
    pace = pace_of((1, 10 * MS), (8, 40 * MS))
    assert not pace.is_slow(15, 79 * MS)
    assert pace.is_slow(1, 79 * MS)


def test_a_size_without_steps_is_seen_beside_the_others() -> None:
    pace = pace_of((1, 10 * MS), (2, 20 * MS), (4, 30 * MS))
    assert not pace.is_slow(100, 40 * MS)
    assert pace.is_slow(100, 40 * MS + 1)


def test_what_is_usual_changes_with_the_steps() -> None:
    pace = pace_of((1, 10 * MS))
    for _ in range(500):
        pace.add_decode(1, 100 * MS)
    assert not pace.is_slow(1, 150 * MS)
