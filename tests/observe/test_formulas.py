from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystop.observe.formulas import continuous_steps, static_occupancy, static_steps

ONE_BATCH = [20] * 15 + [1000]
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def test_occupancy_of_one_straggler_is_worked_out_as_in_the_text() -> None:
    assert static_steps(ONE_BATCH, 16) == 1000
    assert static_occupancy(ONE_BATCH, 16) == 1300 / 16_000


def test_occupancy_over_several_batches_counts_each_batch_by_its_longest() -> None:
    assert static_steps([5, 1, 2, 2, 3], 2) == 5 + 2 + 3
    assert static_occupancy([5, 1, 2, 2, 3], 2) == pytest.approx(13 / 20)


def test_continuous_steps_follow_the_slot_that_is_free_first() -> None:
    assert continuous_steps([5, 2, 2, 3], 2) == 7
    assert static_steps([5, 2, 2, 3], 2) == 8


@given(LENGTHS, st.integers(1, 8))
def test_no_schedule_is_shorter_than_the_work_or_the_longest_answer(lengths: list[int], num_slots: int) -> None:
    least = max(max(lengths), -(-sum(lengths) // num_slots))
    assert least <= continuous_steps(lengths, num_slots) <= static_steps(lengths, num_slots)


@given(LENGTHS)
def test_a_single_slot_is_always_at_work(lengths: list[int]) -> None:
    assert static_occupancy(lengths, 1) == 1
    assert static_steps(lengths, 1) == continuous_steps(lengths, 1)
