"""The comparison of admissions in a small KV cache, in virtual time, and how its real clients make answers end."""

from __future__ import annotations

import json

import pytest
from benchmarks.memory import (
    MAX_TOKENS,
    SKETCH,
    STOP,
    Setting,
    StoppingTarget,
    at_times,
    compare_simulated,
    make_traffic,
    search,
    simulate,
    table,
    verdicts,
)


@pytest.fixture(scope="module")
def outcomes() -> list:
    workload = make_traffic("chat", 256, 32, seed=7)
    return compare_simulated(workload, 0.3, Setting(max_num_seqs=32), SKETCH, limits=(8, 10, 12))


def test_promises_hold_in_a_small_run(outcomes: list) -> None:
    demand, expected, greedy, *_, best = outcomes
    assert demand.num_preemptions == 0
    assert expected.setting.num_blocks == round(0.3 * demand.peak_blocks)
    assert [good for _, _, good in verdicts(expected, best, 256)] == [True] * 3
    assert greedy.recomputed_share > 2 * expected.recomputed_share


def test_table_has_a_row_a_run_and_the_best_limit_last(outcomes: list) -> None:
    lines = table(outcomes).splitlines()
    assert len(lines) == 2 + len(outcomes)
    assert "100.0%" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1


def test_figures_do_not_depend_on_the_run() -> None:
    workload = make_traffic("mixed", 60, 8, seed=1)
    setting = Setting(max_num_seqs=8, num_blocks=90, admission="expected")
    assert simulate(workload, setting, SKETCH).figures() == simulate(workload, setting, SKETCH).figures()


def test_all_that_was_sent_is_counted_also_with_arrivals_at_their_times() -> None:
    workload = at_times(make_traffic("chat", 80, 8, seed=1), per_s=2.0, seed=1)
    outcome = simulate(workload, Setting(max_num_seqs=8), SKETCH)
    assert outcome.num_finished == 80
    assert outcome.num_output_tokens == sum(job.max_tokens for job in workload.jobs)
    assert outcome.duration_s > workload.jobs[-1].at_s


def test_search_tries_the_neighbours_of_the_best_limit() -> None:
    assert search(lambda limit: -abs(limit - 21), 64) == [4, 8, 12, 16, 17, 18, 19, 20, 21, 22, 23, *range(24, 65, 4)]
    assert search(lambda limit: float(limit), 6) == [1, 2, 3, 4, 5, 6]


def test_promises_that_are_broken_are_named(outcomes: list) -> None:
    _, _, greedy, *_, best = outcomes
    assert not all(good for _, _, good in verdicts(greedy, best, 256))


def test_real_client_asks_for_more_than_comes() -> None:
    """Nothing that the server can plan by tells the length of the answer."""
    (job, *_) = make_traffic("chat", 1, 1, seed=1).jobs
    _, _, body = StoppingTarget(url="http://127.0.0.1:1").request(job).partition(b"\r\n\r\n")
    fields = json.loads(body)
    assert (fields["max_tokens"], fields["min_tokens"]) == (MAX_TOKENS, job.max_tokens - 1)
    assert (fields["stop_token_ids"], fields["logit_bias"]) == ([STOP], {str(STOP): 100})
