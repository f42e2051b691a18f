"""`Rows` reads like the list of rows that it stands for, and a plan is written as if it held that list."""

from __future__ import annotations

import copy
import json
import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystop.core.plan import StepPlan
from everystop.core.rows import Row, Rows

NUMBERS = st.integers(-(2**63), 2**63 - 1)
ROW_LISTS = st.lists(st.builds(Row, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=12)
TWO = [Row(7, 40, 1, 0, 0), Row(9, 0, 32, 0, 31)]


@given(ROW_LISTS, st.slices(12))
def test_rows_read_like_a_list(expected: list[Row], part: slice) -> None:
    rows = Rows(expected)
    assert list(rows) == expected
    assert all(type(row) is Row for row in rows)
    assert (len(rows), bool(rows)) == (len(expected), bool(expected))
    assert [rows[i] for i in range(-len(rows), len(rows))] == expected + expected
    assert list(rows[part]) == expected[part]
    assert list(reversed(rows)) == expected[::-1]
    assert all(row in rows and rows.index(row) == expected.index(row) for row in expected)


@given(ROW_LISTS)
def test_columns_are_the_fields_of_all_rows(expected: list[Row]) -> None:
    rows = Rows(expected)
    assert list(rows.request_ids) == [row.request_id for row in expected]
    assert list(rows.starts) == [row.start for row in expected]
    assert list(rows.nums_tokens) == [row.num_tokens for row in expected]
    assert list(rows.logits_from) == [row.logits_from for row in expected]


@given(ROW_LISTS, ROW_LISTS)
def test_rows_are_equal_where_their_lists_are(left: list[Row], right: list[Row]) -> None:
    for other in (left, right):
        assert (Rows(left) == Rows(other)) == (Rows(left) == other) == (other == Rows(left)) == (left == other)
        assert (StepPlan(0, Rows(left)) == StepPlan(0, Rows(other))) == (left == other)
    assert Rows(left) != tuple(left)


@given(ROW_LISTS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), ROW_LISTS)
def test_rows_are_added_behind_those_there(first: list[Row], decodes: list[tuple[int, int]], last: list[Row]) -> None:
    rows = Rows(first)
    rows.append_decodes([request_id for request_id, _ in decodes], array("q", [start for _, start in decodes]))
    for row in last:
        rows.append(row)
    assert rows == [*first, *(Row(request_id, start, 1, 0, 0) for request_id, start in decodes), *last]


def test_decodes_without_a_place_each_are_refused() -> None:
    with pytest.raises(ValueError, match="size 1"):
        Rows(TWO).append_decodes([1], array("q", [5, 6]))


def test_no_row_is_added_while_rows_are_read() -> None:
    rows = Rows(TWO)
    reading = rows.tuples()
    with pytest.raises(BufferError):
        rows.append(TWO[0])
    assert list(reading) == [tuple(row) for row in rows] == TWO
    rows.append(TWO[0])


@pytest.mark.parametrize("index", [2, -3])
def test_a_row_that_is_not_there_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError):
        Rows(TWO)[index]


def test_copies_share_nothing() -> None:
    rows = Rows(TWO)
    for other in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows)), Rows(rows), rows[:], eval(repr(rows))):
        other.append(Row(1, 2, 3, 0, 2))
        assert rows == TWO
        assert other == [*TWO, Row(1, 2, 3, 0, 2)]


def test_a_plan_keeps_rows_and_takes_any_others() -> None:
    rows = Rows(TWO)
    assert StepPlan(0, rows).rows is rows
    assert StepPlan(0, rows=TWO) == StepPlan(0, rows=iter(TWO)) == StepPlan(0, rows)
    assert StepPlan(0).rows is not StepPlan(0).rows


def test_a_plan_writes_its_rows_as_lists_of_five_numbers() -> None:
    plan = StepPlan(3, rows=TWO, copies=[(1, 2)], released=[4])
    plain = {
        "step_id": 3,
        "rows": [[7, 40, 1, 0, 0], [9, 0, 32, 0, 31]],
        "admitted": [],
        "new_blocks": [],
        "copies": [[1, 2]],
        "released": [4],
        "preempted": [],
        "num_padded_rows": 0,
        "wake_at_ns": None,
        "prompt_logits": [],
    }
    assert plan.to_json() == json.dumps(plain, separators=(",", ":"))
    assert plan.fingerprint() == "163649c1ec8f41b8"
    assert plan.num_tokens == 33
