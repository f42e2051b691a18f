"""Slots of real schedules: what each did when, and nothing twice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from tests.core.harness import Harness, make_request, make_scheduler
from tests.observe.report_runs import STRAGGLER, Virtual, make_comparison, mixed
from tests.observe.runs import MS
from tests.observe.runs import Run as EngineRun

from everystop.core.events import FinishEvent, PreemptEvent
from everystop.observe.comparison import Run
from everystop.observe.history import History
from everystop.observe.report.curves import area, averaged, slots_at_work, tokens_so_far
from everystop.observe.report.grammar import Use
from everystop.observe.report.lanes import Lanes, Stretch, joined, read_cells, read_lanes
from everystop.observe.report.shown import shown_repeat, shown_runs
from everystop.observe.slot_use import slot_use


def lanes_under(
    policy: str, jobs: tuple[tuple[int, int, int], ...] = STRAGGLER, **scheduler: object
) -> tuple[Run, Lanes]:
    run = Virtual(policy, jobs, 0, scheduler).run()
    assert run.history is not None
    return run, read_lanes(run.history, run.start_ns)


def ns_by_use(lanes: Lanes) -> Counter[Use]:
    spent: Counter[Use] = Counter()
    for stretch in lanes.stretches:
        spent[Use.DECODE if stretch.use is Use.SLOW else stretch.use] += stretch.end_ns - stretch.start_ns
    return spent


@pytest.mark.parametrize("policy", ["static", "static-padded", "continuous", "shortest", "fair"])
@pytest.mark.parametrize("num_blocks", [4096, 40])
def test_a_slot_never_does_two_things_at_once(policy: str, num_blocks: int) -> None:
    _, lanes = lanes_under(policy, mixed(30, 15), num_blocks=num_blocks)
    for before, after in pairwise(lanes.stretches):
        assert before.start_ns < before.end_ns
        if before.slot == after.slot:
            assert before.end_ns <= after.start_ns
    assert len(lanes.ends) == 30
    assert lanes.num_slots <= 8


def test_every_row_of_every_step_is_a_cell() -> None:
    run, _ = lanes_under("static-padded")
    assert run.history is not None
    cells = list(read_cells(run.history))
    assert len(cells) == sum(step.num_rows for step in run.history.steps.since(0))
    assert sum(cell.use is Use.PADDING for cell in cells) == sum(
        step.num_padded_rows for step in run.history.steps.since(0)
    )


def test_a_static_batch_holds_the_slots_of_those_who_are_done() -> None:
    run, lanes = lanes_under("static")
    assert len(lanes.batches) == 2
    (first_start, first_end), (second_start, second_end) = lanes.batches
    assert first_start == run.start_ns
    assert first_end <= second_start
    assert second_end == lanes.end_ns
    straggler = next(end for end in lanes.ends if end.request_id == 0)
    assert first_end == straggler.at_ns
    held = [stretch for stretch in lanes.stretches if stretch.use is Use.HELD]
    ends = {end.request_id: end.at_ns for end in lanes.ends}
    assert len(held) == 13  # all but the straggler, and but the last two, which end together
    for stretch in held:
        assert stretch.start_ns == ends[stretch.request_id]
        assert stretch.end_ns in (first_end, second_end)


def test_held_and_padded_slots_agree_with_the_account_of_slot_time() -> None:
    for policy, use in (("static", Use.HELD), ("static-padded", Use.PADDING)):
        run, lanes = lanes_under(policy)
        used = slot_use(run)
        assert used is not None
        assert ns_by_use(lanes)[use] == pytest.approx(used.slot_ns[use], rel=0.1)  # overhead apart
        assert used.slot_ns[use] > 0


def test_nothing_is_held_under_continuous_and_no_batch_is_marked() -> None:
    _, lanes = lanes_under("continuous")
    assert lanes.batches == ()
    assert not {Use.HELD, Use.PADDING} & ns_by_use(lanes).keys()


def test_prefill_is_in_chunks_of_the_budget_and_decode_follows() -> None:
    _, lanes = lanes_under("continuous", ((200, 5, 0),))
    prefill, decode = lanes.stretches
    assert prefill.use is Use.PREFILL
    assert len(prefill.ticks) == 3  # 64 + 64 + 64 + 8
    assert prefill.end_ns == decode.start_ns
    assert decode.use in (Use.DECODE, Use.SLOW)


def test_what_a_preempted_request_computes_again_is_told_apart() -> None:
    run, lanes = lanes_under("continuous", mixed(20, 5), num_blocks=30)
    assert run.history is not None
    num_again = sum(step.num_recomputed_tokens for step in run.history.steps.since(0))
    assert num_again > 0
    assert ns_by_use(lanes)[Use.RECOMPUTE] > 0


def test_who_gets_no_token_of_a_step_is_passed_over_for_that_long() -> None:
    run, lanes = lanes_under("static", mixed(48, 20))
    passed_over = [stretch for stretch in lanes.stretches if stretch.use is Use.SKIPPED]
    assert passed_over
    assert run.history is not None
    for stretch in passed_over:
        within = [s for s in run.history.steps.since(0) if stretch.start_ns < s.now_ns <= stretch.end_ns and s.num_rows]
        assert within
        assert all(step.row_of(stretch.request_id) < 0 for step in within)


def test_nobody_is_passed_over_between_two_steps() -> None:
    """While the host is busy no step gives anybody a token."""
    run = EngineRun(host_ns=30 * MS)
    run.add(0, prompt=8, max_tokens=3)
    run.finish()
    prefill, decode = read_lanes(run.history, 0).stretches
    assert (prefill.use, decode.use) == (Use.PREFILL, Use.DECODE)
    assert prefill.end_ns == decode.start_ns


def test_who_was_preempted_and_comes_back_to_the_same_slot_was_not_passed_over() -> None:
    run, lanes = lanes_under("continuous", mixed(30, 5), num_blocks=30)
    assert run.history is not None
    losses = [act for act in run.history.acts.since(0) if isinstance(act, PreemptEvent)]
    assert losses
    for stretch in lanes.stretches:
        gone = [act for act in losses if act.request_id == stretch.request_id]
        assert not any(stretch.start_ns <= act.now_ns < stretch.end_ns for act in gone), stretch


def test_a_step_is_slow_beside_steps_of_its_own_size_only() -> None:
    run, lanes = lanes_under("continuous")
    assert run.history is not None
    slow = [stretch for stretch in lanes.stretches if stretch.use is Use.SLOW]
    assert slow
    usual_ns = 8_000_000  # eight rows take about 7 ms, a spike two and a half times as long
    assert all(stretch.end_ns - stretch.start_ns > usual_ns for stretch in slow)


def test_a_cancelled_request_ends_as_such_and_the_queue_is_counted() -> None:
    harness = Harness(make_scheduler(max_num_seqs=2))
    for i in range(5):
        harness.add(make_request(i, 4, max_tokens=9))
    harness.turn()
    harness.abort(0)
    harness.abort(4)
    harness.run()
    history = History()
    history.receive(harness.events)
    history.catch_up()
    lanes = read_lanes(history, 0)
    aborted = [
        act.request_id for act in history.acts.since(0) if isinstance(act, FinishEvent) and act.reason == "abort"
    ]
    assert aborted == [0, 4]
    assert {end.request_id for end in lanes.ends if end.reason == "abort"} == {0}  # the other had no slot
    values = [level.value for level in lanes.waiting]
    assert max(values) == 5
    assert values[-1] == 0


def test_joining_keeps_what_is_seen_and_drops_what_is_too_fine() -> None:
    fine = [Stretch(0, i, Use.DECODE if i % 3 else Use.PREFILL, i * 10, i * 10 + 10) for i in range(90)]
    fine.append(Stretch(1, 7, Use.DECODE, 0, 900))
    coarse = joined(fine, 100)
    assert len(coarse) <= 11
    for before, after in pairwise(coarse):
        assert before.slot != after.slot or before.end_ns <= after.start_ns
    assert (coarse[0].start_ns, coarse[-2].end_ns) == (0, 900)
    assert coarse[-1] == fine[-1]
    assert joined(fine, 1) == fine


def test_slots_at_work_sum_up_to_the_time_of_all_kept_rows() -> None:
    run, lanes = lanes_under("static-padded", mixed(12))
    points = slots_at_work(run)
    spent = ns_by_use(lanes)
    useful_s = (sum(spent.values()) - spent[Use.PADDING] - spent[Use.SKIPPED]) / 1e9
    assert area(points, 0, 1e9) == pytest.approx(useful_s)
    assert area(averaged(points, 0.05), 0, 1e9) == pytest.approx(useful_s)
    assert len(averaged(points, 0.05)) < len(points)
    assert tokens_so_far(run)[-1] == (pytest.approx(run.duration_s), run.num_output_tokens)


def test_the_shown_repeat_has_the_median_gain() -> None:
    comparison = make_comparison(num_repeats=3)
    gains = [first.duration_s / second.duration_s for first, second in comparison.pairs("static", "continuous")]
    repeat = shown_repeat(comparison)
    assert repeat is not None
    assert sorted(gains)[1] == gains[repeat]
    assert [run.policy for run in shown_runs(comparison)] == ["static", "continuous"]
    assert {run.repeat for run in shown_runs(comparison)} == {repeat}
