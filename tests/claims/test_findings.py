from __future__ import annotations

import json

import pytest

from everystop.claims.findings import (
    Condition,
    Figure,
    Findings,
    Source,
    Verdict,
    counted,
    exact,
    in_words,
    measured,
    verdict_of,
)


def make_figure(low: float | None, high: float | None) -> Figure:
    return Figure(name="x", value=2.0, unit="×", low=low, high=high, source=Source.MEASURED, num_repeats=5)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (2.1, 2.4, Verdict.HELD),
        (2.0, 2.4, Verdict.HELD),
        (1.9, 2.4, Verdict.UNDECIDED),
        (1.5, 2.0, Verdict.UNDECIDED),
        (1.5, 1.9, Verdict.DID_NOT_HOLD),
        (None, None, Verdict.UNDECIDED),
    ],
)
def test_an_interval_is_held_against_a_lower_bound(low: float | None, high: float | None, verdict: Verdict) -> None:
    assert Condition(figure=make_figure(low, high), at_least=2.0).verdict is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.0, 1.2, Verdict.HELD), (1.1, 1.3, Verdict.UNDECIDED), (1.3, 1.4, Verdict.DID_NOT_HOLD)],
)
def test_an_interval_is_held_against_an_upper_bound(low: float, high: float, verdict: Verdict) -> None:
    assert Condition(figure=make_figure(low, high), at_most=1.2).verdict is verdict


def test_one_measured_repeat_decides_nothing_but_one_count_does() -> None:
    assert Condition(figure=measured("x", [5.0], "×"), at_least=2).verdict is Verdict.UNDECIDED
    assert Condition(figure=counted("x", [5], "steps"), at_least=2).verdict is Verdict.HELD
    assert Condition(figure=counted("x", [1, 5], "steps"), at_least=2).verdict is Verdict.UNDECIDED


def test_a_claim_holds_only_if_all_its_conditions_do() -> None:
    held, failed = (Condition(figure=exact("x", value, "", Source.COMPUTED), at_least=2) for value in (3, 1))
    unknown = Condition(figure=measured("x", [3.0], ""), at_least=2)
    assert verdict_of([held, held]) is Verdict.HELD
    assert verdict_of([held, unknown]) is Verdict.UNDECIDED
    assert verdict_of([unknown, failed, held]) is Verdict.DID_NOT_HOLD


def test_numbers_carry_their_units() -> None:
    assert in_words(0.0811, "%") == "8.11 %"
    assert in_words(1004, "steps") == "1,004 steps"
    assert in_words(0.0123, "s") == "12.3 ms"
    assert in_words(2.456, "×") == "2.46 ×"


def test_bounds_are_said_in_the_unit_of_the_figure() -> None:
    assert Condition(figure=counted("x", [980], "steps"), at_least=978, at_most=982).bound_text() == (
        "978 steps to 982 steps"
    )
    assert Condition(figure=make_figure(1, 2), at_most=0.5).bound_text() == "at most 0.500 ×"


def test_findings_come_back_from_json() -> None:
    figure = measured("x", [1.0, 2.0], "×")
    findings = Findings(
        headline="h",
        how="w",
        conditions=(Condition(figure=figure, at_least=1),),
        figures=(counted("y", [1]),),
        remarks=("r",),
        data={"rows": [1, 2]},
    )
    assert Findings.from_data(json.loads(json.dumps(findings.as_data()))) == findings
