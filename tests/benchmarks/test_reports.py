"""What the comparisons make of their figures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from benchmarks.local_server import difference, read_counters

from benchmarks import serving, straggler
from everystop.trial.http_client import ClientRecord
from everystop.trial.http_load import LoadRun

METRICS = """\
# HELP everystop_steps_total Steps executed
everystop_steps_total{model_name="m"} 12.0
everystop_num_requests_running{model_name="m"} 3.0
everystop_step_seconds_bucket{le="0.5",model_name="m"} 12.0
everystop_step_seconds_count{model_name="m"} 12.0
everystop_request_success_total{finished_reason="stop",model_name="m"} 1.0
everystop_request_success_total{finished_reason="length",model_name="m"} 4.0
python_info 1.0
"""


def make_runs(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rounds that keep every promise, but for `changes` by policy."""
    figures = {
        "continuous": {"steps": 1062, "wall_s": 4.0, "short_e2e_mean_s": 0.5, "short_e2e_p90_s": 0.75},
        "static": {"steps": 4001, "wall_s": 14.0, "short_e2e_mean_s": 5.0, "short_e2e_p90_s": 9.0},
        "static-padded": {"steps": 4001, "wall_s": 24.0, "short_e2e_mean_s": 9.0, "short_e2e_p90_s": 18.0},
    }
    others = {"answers": "a", "itl_p99_ms": 9.0, "long_decode_s": 3.0}
    return [
        {"policy": policy, **others, **values, **changes.get(policy, {})}
        for _ in range(2)
        for policy, values in figures.items()
    ]


def failures(runs: list[dict[str, Any]]) -> list[str]:
    return [title for title, _, good in straggler.verdicts(runs, straggler.compare(runs)) if not good]


def test_promises_that_are_kept_pass_and_ratios_are_times_continuous() -> None:
    runs = make_runs()
    assert straggler.compare(runs)["static"]["wall_s"] == [3.5, 3.5]
    assert failures(runs) == []


@pytest.mark.parametrize(
    ("policy", "change", "expected"),
    [
        ("static", {"steps": 4016}, "steps, static"),
        ("continuous", {"steps": 1091}, "steps, continuous"),
        ("static", {"answers": "b"}, "answers"),
        ("static", {"wall_s": 7.9}, "wall: static at"),
        ("static-padded", {"wall_s": 19.9}, "wall: static-padded"),
        ("static", {"short_e2e_mean_s": 3.4}, "short E2E, mean"),
        ("static", {"short_e2e_p90_s": 5.9}, "short E2E, p90"),
    ],
)
def test_each_promise_fails_alone(policy: str, change: dict[str, Any], expected: str) -> None:
    (failed,) = failures(make_runs(**{policy: change}))
    assert failed.startswith(expected)


def test_a_straight_line_is_found() -> None:
    assert straggler.straight_line([(1, 3.5), (2, 4.0), (16, 11.0)]) == pytest.approx((3.0, 0.5))


def test_the_gap_of_a_step_is_taken_while_all_decode() -> None:
    early = ClientRecord(0, "all", 1, 5, event_s=[0.0, 0.1, 0.2, 0.3, 0.4])
    late = ClientRecord(1, "all", 1, 5, event_s=[0.2, 0.3, 0.4, 9.0])
    assert straggler.step_gap_ms(LoadRun("w", 2, [early, late])) == pytest.approx(100.0)


def test_a_failed_request_ends_the_comparison() -> None:
    with pytest.raises(SystemExit, match="job 0 failed: gone"):
        straggler.check(LoadRun("w", 1, [ClientRecord(0, "all", 1, 1, error="gone")]))


def test_equal_answers_start_differently() -> None:
    workload = straggler.equal_answers(8, 96, seed=1)
    assert len({job.prompt[0] for job in workload.jobs}) == workload.num_clients == 8


def test_most_at_once_counts_overlapping_answers() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.7), (2.5, 4.0)]
    records = [ClientRecord(i, "all", 1, 2, event_s=[start, end]) for i, (start, end) in enumerate(spans)]
    for order in itertools.permutations(records):
        assert serving.most_at_once(order) == 3
    assert serving.most_at_once([ClientRecord(0, "all", 1, 1)]) == 0


@pytest.mark.parametrize(("computed", "cached", "good"), [(6144, 160, True), (6145, 160, False), (6144, 159, False)])
def test_serving_judges_the_shared_prefix_and_the_second_turn(computed: int, cached: int, good: bool) -> None:
    fine = {"errors": 0, "inexact": 0, "tokens_lost": 0, "prompt_tokens": 35_000, "most_at_once": 32}
    rows = [
        {"workload": "shared", "computed_prompt_tokens": computed, **fine},
        {"workload": "second turn", "cached_tokens": cached, "could_be_cached": 160},
    ]
    assert all(holds for _, _, holds in serving.verdicts(rows)) is good


def test_counters_are_read_without_labels_and_buckets() -> None:
    counters = read_counters(METRICS)
    assert counters == {"steps": 12.0, "num_requests_running": 3.0, "step_seconds_count": 12.0, "request_success": 5.0}
    assert difference(counters, {"steps": 2.0})["steps"] == 10.0
