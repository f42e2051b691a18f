"""What the comparison of chats with and without long prompts makes of its figures."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.stall import CALM, DEFAULT, WHOLE_PROMPTS, settings, table, verdicts


def row(p99: float, tok_s: float, *ttft: float) -> dict[str, Any]:
    figures = {"itl_p50_ms": 10.0, "itl_p99_ms": p99, "computed_tok_s": tok_s, "output_tok_s": tok_s / 2}
    return figures | {"long_ttft_ms": list(ttft)}


def made_up(p99: float = 99.0, tok_s: float = 91.0, ttft: float = 1990.0) -> dict[str, list[dict[str, Any]]]:
    return {
        CALM: [row(40.0, 200.0), row(30.0, 200.0), row(50.0, 200.0)],
        DEFAULT: [row(p99, tok_s, ttft / 2, ttft)],
        WHOLE_PROMPTS: [row(500.0, 99.0, 900.0, 1000.0)],
        "stall, 96 tokens a step": [row(120.0, 100.0, 1500.0)],
    }


def test_what_is_promised_is_judged_by_medians_and_the_best_of_the_others() -> None:
    checks = verdicts(made_up())
    assert [holds for *_, holds in checks] == [True, True, True]
    assert [found for _, found, _ in checks] == ["2.48 times", "91.0%", "1.95 times"]
    assert "96 tokens a step" in checks[1][0]


@pytest.mark.parametrize(("bad", "place"), [({"p99": 100.0}, 0), ({"tok_s": 89.0}, 1), ({"ttft": 2200.0}, 2)])
def test_each_promise_can_be_broken(bad: dict[str, float], place: int) -> None:
    assert [holds for *_, holds in verdicts(made_up(**bad))] == [index != place for index in range(3)]


def test_the_table_has_a_line_for_each_setting_and_no_long_prompts_where_there_are_none() -> None:
    lines = table(made_up()).splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("| calm | 10.0")
    assert lines[2].split(" | ")[3:5] == ["", ""]


def test_fixed_budgets_are_not_bounded_by_those_who_decode() -> None:
    flags = {name: flags for name, (_, flags) in settings([64]).items()}
    assert flags[DEFAULT] == flags[CALM] == []
    assert flags["stall, 64 tokens a step"] == ["--max-num-batched-tokens", "64", "--max-prefill-per-decode", "0"]
