"""What is gained and lost, in ratios, in vLLM's keys, in report.json and in words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.observe.test_comparison import compare, line, real_history, run

from everystop.observe.bench_keys import bench_keys
from everystop.observe.comparison import Comparison, RequestLine, Run, from_json
from everystop.observe.comparison_text import describe_comparison, in_words
from everystop.observe.gains import HEADLINE, gains, headline
from everystop.observe.ratios import Ratio, mean_ratio
from everystop.observe.report_data import report_data


def answer(index: int, sent_s: float, first_s: float, gap_s: float, num: int, **fields: Any) -> RequestLine:
    times = tuple(first_s + gap_s * i for i in range(num))
    return line(index, sent_s=sent_s, token_s=times, end_s=times[-1], num_output_tokens=num, **fields)


def made_run(policy: str, repeat: int, slow: float, gap_s: float, **fields: Any) -> Run:
    """Everything takes `slow` times as long, but gaps between tokens are as they are."""
    lines = (
        answer(0, 0.0, 1.0 * slow, gap_s, 5, group="long", **fields),
        *(answer(i, 0.0, 0.1 * i * slow, gap_s, 3, group="short", **fields) for i in range(1, 5)),
    )
    return run(policy, repeat, *lines, seconds=2.0 * slow)


def two_policies(*, gap_s: float = 0.02, num: int = 5, **fields: Any) -> Comparison:
    """`fast` is twice as fast, with twice as long gaps; each repeat is slower than the one before."""
    runs = []
    for repeat in range(num):
        slow = 1 + 0.5 * repeat
        runs += [made_run("slow", repeat, 2 * slow, 0.01), made_run("fast", repeat, slow, gap_s, **fields)]
    return compare(*runs, asked=num)


def test_ratios_are_times_better_whichever_way_a_figure_goes() -> None:
    ratios = {gain.measure.name: gain.ratio for gain in gains(two_policies(), "fast")}
    for name in ("output_throughput", "duration", "ttft_mean", "ttft_p95", "ttft_mean/short"):
        ratio = ratios[name]
        assert ratio is not None
        assert ratio.mean == pytest.approx(2.0)
        assert (ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(2.0)), "noise that meets both cancels"
    for name in ("itl_p99", "tpot_mean", "decode_mean/long"):
        ratio = ratios[name]
        assert ratio is not None
        assert ratio.mean == pytest.approx(0.5)


def test_the_headline_has_three_figures_and_every_loss() -> None:
    said = headline(two_policies(), "fast")
    assert (said.policy, said.baseline) == ("fast", "slow")
    assert tuple(gain.measure.name for gain in said.figures) == HEADLINE
    lost = [gain.measure.name for gain in said.losses]
    assert {"itl_p99", "itl_mean", "decode_mean/long", "decode_mean/short"} <= set(lost)
    assert not {"ttft_p95", "ttft_mean", "duration"} & set(lost)
    assert not headline(two_policies(gap_s=0.005), "fast").losses


def test_one_repeat_makes_no_loss_of_what_two_equal_runs_differ_by() -> None:
    names = [gain.measure.name for gain in headline(two_policies(gap_s=0.0102, num=1), "fast").losses]
    assert "itl_p99" not in names
    names = [gain.measure.name for gain in headline(two_policies(gap_s=0.0108, num=1), "fast").losses]
    assert "itl_p99" in names


def test_a_policy_may_be_compared_with_any_other() -> None:
    back = headline(two_policies(), "slow", "fast")
    assert all(gain.is_loss for gain in back.figures)


def test_keys_are_those_of_vllm_and_agree_with_numpy() -> None:
    first, other = made_run("p", 0, 1.0, 0.02), made_run("p", 1, 3.0, 0.05)
    failed = run("p", 2, answer(0, 0.0, 9.0, 9.0, 9, error="refused"), seconds=1.0)
    keys = bench_keys([first, other, failed], {"model_id": "m", "date": "today", "num_clients": 5})
    lines = [*first.requests, *other.requests]
    assert (keys["completed"], keys["failed"], keys["num_prompts"], keys["duration"]) == (10, 1, 11, 9.0)
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (40, 34)
    assert keys["output_throughput"] == pytest.approx(34 / 9)
    assert keys["total_token_throughput"] == pytest.approx(74 / 9)
    assert (keys["model_id"], keys["label"], keys["max_concurrency"], keys["request_rate"]) == ("m", "p", 5, "inf")
    samples = {
        "ttft": [each.ttft_s for each in lines],
        "tpot": [(each.e2e_s - (each.ttft_s or 0.0)) / (each.num_output_tokens - 1) for each in lines],
        "itl": [gap for each in lines for gap in np.diff(each.token_s)],
        "e2el": [each.e2e_s for each in lines],
    }
    for name, values in samples.items():
        in_ms = np.array(values, dtype=float) * 1e3
        assert keys[f"mean_{name}_ms"] == pytest.approx(in_ms.mean())
        assert keys[f"median_{name}_ms"] == pytest.approx(np.median(in_ms))
        assert keys[f"std_{name}_ms"] == pytest.approx(in_ms.std())
        for percent in (50, 90, 95, 99):
            assert keys[f"p{percent}_{name}_ms"] == pytest.approx(np.percentile(in_ms, percent))


def test_keys_count_what_was_at_once() -> None:
    lines = (
        answer(0, 0.0, 0.5, 0.1, 3, scheduled_s=0.0),
        answer(1, 0.2, 0.6, 1.0, 2, scheduled_s=0.2),
        answer(2, 0.7, 0.8, 0.1, 1, scheduled_s=2.0),
    )
    keys = bench_keys([run("p", 0, *lines)], {})
    assert keys["max_concurrent_requests"] == 2
    assert keys["max_output_tokens_per_s"] == 5
    assert keys["request_rate"] == 1.5


def test_keys_without_a_value_are_none() -> None:
    keys = bench_keys([run("p", 0, line(0, error="refused", token_s=(), num_output_tokens=0))], {})
    assert (keys["mean_ttft_ms"], keys["p99_itl_ms"], keys["completed"]) == (None, None, 0)


def test_report_data_is_json_that_can_be_drawn_again() -> None:
    comparison = two_policies()
    data = json.loads(json.dumps(report_data(comparison), allow_nan=False))
    assert from_json(data["comparison"]).policies == comparison.policies
    assert data["outputs"] == {"num_equal": 5, "different": [], "num_uncompared": 0}
    by_name = {entry["measure"]: entry for entry in data["ratios"]["fast"]}
    assert by_name["ttft_p95"]["times_better"]["mean"] == pytest.approx(2.0)
    assert len(by_name["ttft_p95"]["values"]) == 5
    assert data["headline"]["fast"]["figures"] == list(HEADLINE)
    assert data["by_policy"]["slow"]["completed"] == 25
    assert [entry["label"] for entry in data["by_run"]] == ["slow", "fast"] * 5
    assert data["by_policy"]["slow"]["slots"] is None


def test_report_data_says_where_the_slots_went_where_that_is_known() -> None:
    data = report_data(compare(run("a", 0, history=real_history()), run("b", 0, history=real_history())))
    slots = data["by_policy"]["a"]["slots"]
    assert slots["num_slots"] == 4
    assert sum(slots["slot_steps"].values()) == 4 * slots["num_steps"]


def test_words_say_gains_and_losses_in_the_same_form() -> None:
    text = describe_comparison(two_policies())
    assert "2.00 × better [2.00, 2.00]" in text
    assert "2.00 × worse [2.00, 2.00]" in text
    said = text.partition("fast against slow")[2].partition("\n\n")[0].splitlines()
    assert any("worse" in words and "ITL p99" in words for words in said)
    assert "each with the same output in all 10 runs" in text
    assert "clients were measured, not its scheduler" in text


def test_a_ratio_in_words_is_above_one_and_says_what_is_not_decided() -> None:
    assert in_words(None) == "no ratio"
    assert in_words(mean_ratio([0.5])) == "2.00 × worse (one repeat)"
    assert in_words(Ratio(values=(), mean=0.5, low=0.4, high=0.8)) == "2.00 × worse [1.25, 2.50]"
    assert in_words(Ratio(values=(), mean=0.8, low=0.5, high=1.25)) == "1.25 × worse [0.80, 2.00], undecided"


def test_words_are_loud_about_outputs_that_differ_errors_and_interruptions() -> None:
    text = describe_comparison(two_policies(digest="other"))
    assert "OUTPUTS DIFFER: 5 requests" in text
    failed = compare(made_run("a", 0, 1.0, 0.1), run("b", 0, line(0, error="too long"), line(1, error="too long")))
    text = describe_comparison(failed)
    assert "ERRORS: 2 requests failed" in text
    assert "too long" in text
    assert "no ratio" in text
    cut = compare(made_run("a", 0, 1.0, 0.1), made_run("b", 0, 1.0, 0.1), made_run("a", 1, 1.0, 0.1), asked=3)
    assert "INTERRUPTED: 3 repeats were asked for" in describe_comparison(cut)


def test_one_policy_alone_has_figures_and_no_ratio() -> None:
    text = describe_comparison(compare(made_run("server", 0, 1.0, 0.1), made_run("server", 1, 1.0, 0.1), asked=2))
    assert "TTFT p95" in text
    assert "against" not in text
    assert "Intervals" not in text


def test_goodput_counts_requests_whose_every_token_came_in_time() -> None:
    demand = {"slo_ttft_ms": 310.0, "slo_itl_ms": 15.0}
    runs = two_policies(num=1)
    demanding = replace(runs, settings=demand)
    keys = {run.policy: bench_keys([run], demand) for run in runs.runs}
    assert keys["slow"]["request_goodput"] == pytest.approx(1 / 4.0)
    assert keys["fast"]["request_goodput"] == 0.0
    assert bench_keys(runs.runs_of("fast"), {"slo_ttft_ms": 310.0})["request_goodput"] == pytest.approx(3 / 2.0)
    assert bench_keys(runs.runs_of("fast"), {})["request_goodput"] is None
    found = {gain.measure.name: gain for gain in gains(demanding, "fast")}
    assert (found["goodput"].baseline, found["goodput"].values, found["goodput"].ratio) == ((0.25,), (0.0,), None)
    assert "good requests a second" in describe_comparison(demanding)
    assert "good requests" not in describe_comparison(runs)
