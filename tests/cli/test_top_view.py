"""What `everystop top` makes of the stream: who did what in which column, and the figures of the last minute."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.cli.streams import MS, START_NS, TILES, S, first, message, request, step

from everystop.cli.top_view import COLUMN_NS, DECODE, HELD, PADDED, PREFILL, RECOMPUTE, SKIPPED, SLOW, LiveView, Minute


def view_of(*messages: dict[str, Any]) -> LiveView:
    view = LiveView()
    for one in messages:
        view.take(one)
    return view


def kinds(view: LiveView, slot: int) -> list[str]:
    """What the slot did in its columns, from the first on; START_NS begins one."""
    return [kind for _, kind in view.cells[slot]]


def in_columns(*rows: list[tuple[int, int, int, int]], **counts: int) -> list[list[Any]]:
    """A step of 10 ms in each column."""
    return [
        step(START_NS + i * COLUMN_NS, START_NS + i * COLUMN_NS + 10 * MS, row, **counts) for i, row in enumerate(rows)
    ]


def test_a_request_that_computes_again_after_its_first_token_recomputes() -> None:
    steps = in_columns([(0, 7, 100, 1)], [(0, 7, 1, 1)], [(0, 7, 64, 0)], [(0, 7, 38, 1)], [(0, 7, 1, 1)])
    told = request(7, slot=0, first_token_ns=START_NS + 10 * MS)
    view = view_of(first(START_NS + 2 * S, steps=steps, requests=[told]))
    assert kinds(view, 0) == [PREFILL, DECODE, RECOMPUTE, RECOMPUTE, DECODE]


def test_a_request_whose_first_token_was_not_seen_recomputes_too() -> None:
    told = request(7, slot=0, first_token_ns=START_NS - S)
    view = view_of(first(START_NS + S, steps=in_columns([(0, 7, 64, 0)]), requests=[told]))
    assert kinds(view, 0) == [RECOMPUTE]


def test_a_request_is_preempted_before_its_first_token_and_reads_its_prompt() -> None:
    steps = in_columns([(0, 7, 64, 0)], [(0, 7, 64, 0)], [(0, 7, 36, 1)])
    view = view_of(first(START_NS + S, steps=steps, requests=[request(7, slot=0)]))
    assert kinds(view, 0) == [PREFILL] * 3


def test_a_prompt_of_one_token_is_no_decode() -> None:
    view = view_of(first(START_NS + S, steps=in_columns([(0, 7, 1, 1)], [(0, 7, 1, 1)]), requests=[request(7, slot=0)]))
    assert kinds(view, 0) == [PREFILL, DECODE]


def test_decode_in_a_step_of_twice_the_usual_time_is_slow() -> None:
    ends = [START_NS + 10 * MS * i for i in range(17)]
    steps = [step(begin, end, [(0, 7, 1, 1)]) for begin, end in itertools.pairwise(ends)]
    long_ns = START_NS + 2 * COLUMN_NS
    steps.append(step(long_ns, long_ns + 20 * MS, [(0, 7, 1, 1)]))  # twice the median is not more than that
    steps.append(step(long_ns + COLUMN_NS, long_ns + 3 * COLUMN_NS, [(0, 7, 1, 1), (1, 8, 50, 0)]))
    told = [request(7, slot=0, first_token_ns=START_NS - S), request(8, slot=1)]
    view = view_of(first(START_NS + 2 * S, steps=steps, requests=told))
    assert kinds(view, 0) == [DECODE, DECODE, SLOW, SLOW]
    assert kinds(view, 1) == [PREFILL, PREFILL]
    assert [column.longest_ns for column in view.columns][-2:] == [2 * COLUMN_NS] * 2


def test_in_a_column_what_took_longer_decides_between_slow_and_usual_decode() -> None:
    ends = [START_NS + 10 * MS * i for i in range(18)]
    steps = [step(begin, end, [(0, 7, 1, 1)]) for begin, end in itertools.pairwise(ends)]
    steps.append(step(ends[-1], ends[-1] + 30 * MS, [(0, 7, 1, 1)]))
    view = view_of(first(START_NS + S, steps=steps, requests=[request(7, slot=0, first_token_ns=START_NS - S)]))
    assert kinds(view, 0) == [DECODE]


def test_padded_held_and_passed_over_slots_are_told_apart() -> None:
    over = request(8, slot=1, state="finished", first_token_ns=START_NS - S, finish_ns=START_NS - MS)
    goes_on = [request(7, slot=0, first_token_ns=START_NS - S), request(9, slot=2, first_token_ns=START_NS - S)]
    rows = [(0, 7, 1, 1), (2, 9, 1, 1), (1, 8, 1, 0)]
    steps = in_columns(rows, num_padded=1, num_held=1)
    begin_ns = START_NS + COLUMN_NS
    steps.append(step(begin_ns, begin_ns + MS, [(0, 7, 1, 1)], num_held=1))
    view = view_of(first(START_NS + S, steps=steps, requests=[over, *goes_on]))
    assert kinds(view, 1) == [PADDED, HELD]
    assert kinds(view, 2) == [DECODE, SKIPPED]
    begin_ns += COLUMN_NS
    view.take(message(START_NS + 2 * S, steps=[step(begin_ns, begin_ns + MS, [(0, 7, 1, 1)])]))
    assert kinds(view, 1) == [PADDED, HELD]
    assert view.holders == {0: 7, 2: 9}


def test_a_row_that_was_on_its_way_when_its_request_ended_is_thrown_away() -> None:
    over = request(7, slot=0, state="finished", first_token_ns=START_NS + 10 * MS, finish_ns=START_NS + 20 * MS)
    view = view_of(first(START_NS + S, steps=in_columns([(0, 7, 100, 1)], [(0, 7, 1, 0)]), requests=[over]))
    assert kinds(view, 0) == [PREFILL, PADDED]


def test_a_step_without_rows_passes_nobody_over() -> None:
    steps = in_columns([(0, 7, 100, 1)], [])
    view = view_of(first(START_NS + S, steps=steps, requests=[request(7, slot=0)]))
    assert kinds(view, 0) == [PREFILL]


def test_gaps_are_told_of_requests_whose_tokens_were_all_seen() -> None:
    ends = [START_NS + 10 * MS, START_NS + 20 * MS, START_NS + 60 * MS]
    steps = [step(end - MS, end, [(0, 7, 1, 1), (1, 8, 1, 1)]) for end in ends]
    told = [request(7, slot=0, num_output_tokens=3), request(8, slot=1, num_output_tokens=9, max_gap_ns=50 * MS)]
    view = view_of(first(START_NS + S, steps=steps, requests=told))
    assert view.gaps.p99(told[0]) == pytest.approx(40 * MS, rel=0.01)
    assert view.gaps.longest(told[0]) == 40 * MS
    assert view.gaps.p99(told[1]) is None
    assert view.gaps.longest(told[1]) == 50 * MS


def test_no_gap_is_measured_over_steps_that_were_left_out() -> None:
    steps = in_columns([(0, 7, 1, 1)])
    view = view_of(first(START_NS + S, steps=steps, requests=[request(7, slot=0)]))
    later = [step(START_NS + 5 * S, START_NS + 5 * S + MS, [(0, 7, 1, 1)])]
    view.take(message(START_NS + 6 * S, steps=later, dropped=12))
    assert view.gaps.longest(view.requests[7]) is None


def test_what_ended_a_minute_ago_is_forgotten() -> None:
    over = request(7, slot=0, state="finished", finish_ns=START_NS)
    view = view_of(first(START_NS + S, requests=[over], steps=in_columns([(0, 7, 100, 1)])))
    view.take(message(START_NS + 59 * S))
    assert 7 in view.requests
    view.take(message(START_NS + 61 * S))
    assert view.requests == {}
    assert not view.gaps.has_begun(7)


def test_a_minute_in_groups_of_seconds() -> None:
    minute = Minute()
    for second, value in ((0, 5.0), (70, 2.0), (61, 9.0), (62, 1.0), (119, 4.0)):
        minute.note(second * S, value)
    now_ns = 119 * S + 1
    assert minute.highest(now_ns, 6) == [9.0, 2.0, None, None, None, 4.0]
    assert minute.levels(now_ns, 6) == [9.0, 2.0, 2.0, 2.0, 2.0, 4.0]
    assert minute.rates(now_ns, 6) == [9.0, 2.0, 0, 0, 0, 4.0]
    assert minute.levels(now_ns, 60)[0] == 5.0  # what was last before the minute
    assert minute.rates(now_ns, 60)[-2:] == [0, None]  # the last second is not over
    minute.add(119 * S, 3)
    assert minute.highest(now_ns, 60)[-1] == 7.0


def test_a_minute_does_not_grow() -> None:
    minute = Minute()
    for second in range(1000):
        minute.note(second * S, 1.0)
    assert len(minute._seconds) <= 120
    assert minute.highest(999 * S, 60) == [1.0] * 60


def test_who_is_over_leaves_its_slot_though_no_step_follows_unless_its_batch_holds_it() -> None:
    over = request(7, slot=0, state="finished", finish_ns=START_NS + 10 * MS)
    for num_held, num_busy, holders in ((0, 1, {}), (1, 1, {0: 7}), (1, 0, {})):
        view = view_of(first(START_NS + S, steps=in_columns([(0, 7, 100, 1)], num_held=num_held)))
        view.take(message(START_NS + 2 * S, requests=[over], tiles=TILES | {"slots_busy": num_busy}))
        assert view.holders == holders
