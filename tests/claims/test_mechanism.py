"""Claims 0 to 4 in virtual time: what they count is exact there, and every one of them can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.claims.labs import TWO_CORES, figures_of, make_lab

from everystop.claims import full_batch, head_of_line, larger_batch, refill, straggler
from everystop.claims.findings import Condition, Verdict, counted, measured
from everystop.claims.lab import Trial
from everystop.claims.steps import features_of, fit_cost, steps_of
from everystop.core.step_time import StepFeatures
from everystop.sim.cost import CostModel


def test_980_of_1000_static_steps_have_one_row() -> None:
    found = figures_of(straggler.measure(make_lab()))
    assert found["steps of a single row"].value == 980
    assert found["all steps"].value == 1000
    assert found["U = Σ lengths / (B × max length)"].value == pytest.approx(0.08125)
    assert found["slot-steps that bring a token"].value == pytest.approx(0.08125)


def test_a_freed_slot_is_used_again_in_the_next_step() -> None:
    found = figures_of(refill.measure(make_lab()))
    gap = found["longest gap from a slot's end to its next start, continuous"]
    assert gap.value == 1
    assert found["slots used again while others waited, continuous"].value == refill.NUM_JOBS - 16


def test_a_slot_that_static_batching_holds_is_no_refill() -> None:
    found = figures_of(refill.measure(make_lab()))
    gap = found["longest gap from a slot's end to its next start, static"]
    assert gap.value > 100
    assert Condition(figure=gap, at_most=1).verdict is Verdict.DID_NOT_HOLD


def test_rows_are_not_nearly_free_where_nothing_is_shared() -> None:
    shared = full_batch.measure(make_lab(3))
    assert [condition.verdict for condition in shared.conditions] == [Verdict.HELD, Verdict.HELD]
    alone = full_batch.measure(make_lab(3, NOTHING_SHARED))
    assert alone.verdict is Verdict.DID_NOT_HOLD


def test_rows_may_cost_nothing_at_all() -> None:
    found = full_batch.measure(make_lab(3, CostModel(step_ns=5e6)))
    assert found.verdict is Verdict.HELD
    name = "what each further row up to 16 adds to the step, of a lone row's"
    assert figures_of(found)[name].value == 0
    longer = measured("", [0.9, 0.95], "×")
    assert full_batch.further_row(longer).value == pytest.approx((0.9 * 0.95) ** 0.5 / 15 - 1 / 15)


NOTHING_SHARED = CostModel(step_ns=1e5, token_ns=4e6)


def test_who_waits_is_hardly_better_off_where_rows_share_nothing() -> None:
    found = head_of_line.measure(make_lab(3, NOTHING_SHARED))
    assert found.verdict is Verdict.DID_NOT_HOLD
    assert figures_of(found)["mean wait to board, static over continuous"].value < head_of_line.LEAST_TIMES


def test_who_boards_when_the_long_answer_has_ended_is_not_early_though_its_client_has_yet_to_hear() -> None:
    run = make_lab().runs({"x": Trial(head_of_line.blocked(), "static")})["x"][0]
    lines = [replace(line, end_s=line.end_s + 60) if line.group == "long" else line for line in run.requests]
    assert head_of_line.num_early(replace(run, requests=tuple(lines))) == head_of_line.num_early(run) == 0


def test_a_larger_batch_is_no_worse_where_rows_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(larger_batch, "NUM_SIMULATED", 256)
    monkeypatch.setattr(larger_batch, "NUM_MEASURED", 64)
    found = larger_batch.measure(make_lab(2, NOTHING_SHARED))
    assert [condition.verdict for condition in found.conditions[-2:]] == [Verdict.DID_NOT_HOLD] * 2


def test_a_lone_step_is_not_busy_where_it_does_not_read_as_fast_as_it_could() -> None:
    found = straggler.measure(make_lab(2, CostModel(step_ns=1e9)))
    assert [condition.verdict for condition in found.conditions] == [
        Verdict.HELD,
        Verdict.HELD,
        Verdict.HELD,
        Verdict.DID_NOT_HOLD,
    ]


def test_the_bend_is_where_rows_take_as_long_as_what_they_share() -> None:
    found = full_batch.measure(make_lab(1, CostModel(step_ns=5e6, token_ns=5e4)))
    # t = 5 ms + 0.05 ms a row: half of the rate at 256 rows, of which t is 17.8 ms.
    expected = next(rows for rows in range(1, 257) if rows / (5 + 0.05 * rows) >= 256 / 17.8 / 2)
    assert found.data["bend_rows"] == pytest.approx(expected, rel=0.05)


def test_a_level_is_reached_between_the_points_around_it() -> None:
    assert full_batch.reached([1, 2, 4], [1.0, 3.0, 5.0], 2.0) == 1.5
    assert full_batch.reached([1, 2, 4], [1.0, 3.0, 5.0], 0.5) == 1.0


def test_features_of_a_recorded_step_are_those_of_its_plan() -> None:
    run = make_lab().runs({"x": straggler_trial()})["x"][0]
    first, last = steps_of(run)[0], steps_of(run)[-1]
    assert features_of(first) == StepFeatures(16 * 12, 0, 16 * 12 * 13 // 2, 16)
    assert features_of(last) == StepFeatures(1, 12 + 999, 0, 1)


def test_step_times_come_back_out_of_a_run() -> None:
    fitted = fit_cost(make_lab().runs({"x": straggler_trial()})["x"])
    assert fitted.median_error < 0.01
    lone = StepFeatures(1, 500, 0, 1)
    assert fitted.model.execute_ns(lone) == pytest.approx(TWO_CORES.execute_ns(lone) + TWO_CORES.host_ns, rel=0.01)


def straggler_trial() -> Trial:
    return Trial(straggler.one_batch(), "static")


def test_one_step_less_or_more_is_still_980_and_three_are_not() -> None:
    low, high = straggler.LONE_STEPS
    for count, verdict in ((979, Verdict.HELD), (977, Verdict.DID_NOT_HOLD)):
        figure = counted("steps", [count], "steps")
        assert Condition(figure=figure, at_least=low, at_most=high).verdict is verdict
