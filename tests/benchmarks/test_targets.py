"""What the comparison of targets and fixed budgets makes of its figures."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.targets import best_budget, figures, out_of_reach_check, table, verdicts

from everystop.trial.http_client import ClientRecord, Usage
from everystop.trial.http_load import LoadRun

COUNTED = {
    "computed_prompt_tokens": 100.0,
    "generation_tokens": 50.0,
    "step_seconds_sum": 1.0,
    "step_seconds_count": 10.0,
    "iteration_tokens_sum": 150.0,
    "iteration_tokens_count": 10.0,
    "steps": 10.0,
    "steps_over_target": 4.0,
}


def row(p99: float, tok_s: float, ttft: list[float], **setting: Any) -> dict[str, Any]:
    return {
        "target_ms": None,
        "budget": None,
        "itl_p50_ms": 10.0,
        "itl_p99_ms": p99,
        "itl_max_ms": p99,
        "computed_tok_s": tok_s,
        "over_share": 0.0,
        "long_ttft_ms": ttft,
        **setting,
    }


def make_rows(**mine: Any) -> list[dict[str, Any]]:
    """A target of 20 ms that keeps its promises, and three budgets of which the last is too large."""
    own: dict[str, Any] = {"p99": 24.0, "tok_s": 950.0, "ttft": [300.0, 400.0]} | mine
    one_round = [
        row(own["p99"], own["tok_s"], own["ttft"], target_ms=20.0),
        row(15.0, 800.0, [900.0, 990.0], budget=64),
        row(25.0, 1000.0, [400.0, 500.0], budget=128),
        row(60.0, 1200.0, [200.0, 300.0], budget=256),
    ]
    return one_round * 3


def failures(rows: list[dict[str, Any]]) -> list[str]:
    return [title for title, _, good in verdicts(rows) if not good]


def test_a_target_that_keeps_its_promises_holds_against_the_best_budget_that_meets_it() -> None:
    budget, fixed = best_budget(make_rows(), 20.0) or (0, {})
    assert (budget, fixed["computed_tok_s"]) == (128, 1000.0)
    assert failures(make_rows()) == []
    assert len(verdicts(make_rows())) == 4


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ({"p99": 25.1}, "ITL p99"),
        ({"tok_s": 899.0}, "throughput"),
        ({"ttft": [450.0, 460.0]}, "TTFT p50"),
        ({"ttft": [300.0, 501.0]}, "TTFT p95"),
    ],
)
def test_each_promise_fails_alone(mine: dict[str, Any], expected: str) -> None:
    (failed,) = failures(make_rows(**mine))
    assert expected in failed


def test_where_no_budget_meets_a_target_there_is_nothing_to_compare_with() -> None:
    rows = [row(30.0, 900.0, [1.0], target_ms=25.0), row(40.0, 1000.0, [1.0], budget=64)]
    assert best_budget(rows, 25.0) is None
    assert [value for _, value, _ in verdicts(rows)][1:] == ["none of them meets it"]


def test_a_target_out_of_reach_must_be_told_of() -> None:
    assert out_of_reach_check({"over_share": 0.5}, 7.0)[2] is False
    assert out_of_reach_check({"over_share": 0.97}, 7.0)[1:] == ("in 97% of steps", True)


def test_figures_are_of_the_chats_and_of_the_long_prompts() -> None:
    chat = ClientRecord(0, "chat", 4, 3, sent_s=0.0, end_s=2.0, event_s=[1.0, 1.5, 2.0], usage=Usage(4, 3))
    long = ClientRecord(1, "intruder", 9, 1, sent_s=1.0, end_s=3.0, event_s=[3.0], usage=Usage(9, 1))
    found = figures(LoadRun("stall", 1, [chat, long]), COUNTED)
    assert (found["itl_p50_ms"], found["long_ttft_ms"], found["computed_tok_s"]) == (500.0, [2000.0], 50.0)
    assert (found["step_ms"], found["tokens_per_step"], found["over_share"]) == (100.0, 15.0, 0.4)
    with pytest.raises(SystemExit, match="job 0 failed: gone"):
        figures(LoadRun("stall", 1, [ClientRecord(0, "chat", 4, 3, error="gone")]), COUNTED)


def test_the_table_has_a_line_for_each_setting() -> None:
    lines = table(make_rows()).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| target 20.0 ms",
        "| 64 tokens",
        "| 128 tokens",
        "| 256 tokens",
    ]
