"""The comparison of a predicted run with the real one."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.prediction import (
    CLIENTS,
    chats,
    check,
    durations_table,
    mixture,
    replay_checks,
    step_errors,
    steps_table,
)

from everystop.core.step_time import StepFeatures
from everystop.sim.cost import CostModel
from everystop.sim.fit import TimedStep
from everystop.trial.http_client import ClientRecord
from everystop.trial.http_load import LoadRun


def timed(num_tokens: int, prefill_pairs: int, execute_ns: int) -> TimedStep:
    return TimedStep(StepFeatures(num_tokens, 0, prefill_pairs, 1), execute_ns)


def test_errors_of_steps_are_shares_of_their_time_by_kind() -> None:
    model = CostModel(token_ns=100.0)
    steps = [timed(1, 0, 100), timed(2, 0, 400), timed(10, 55, 800)]
    found = step_errors(model, steps)
    assert {name: row["num_steps"] for name, row in found.items()} == {"all": 3, "decode only": 2, "with prefill": 1}
    assert found["decode only"]["median_error"] == pytest.approx(0.25)  # of 0 and 0.5
    assert found["decode only"]["total_error"] == pytest.approx(-0.4)
    assert found["with prefill"]["total_error"] == pytest.approx(0.25)
    assert found["all"]["total_error"] == pytest.approx(0.0)
    assert set(step_errors(model, steps[:1])) == {"all", "decode only"}


def test_the_fitted_run_has_prompts_of_every_size_and_more_jobs_than_can_be_done() -> None:
    workload = mixture(8, 4.0, seed=0)
    lengths = [len(job.prompt) for job in workload.jobs]
    assert (workload.num_clients, len(lengths)) == (8, 108)
    assert min(lengths) < 40
    assert max(lengths) > 800
    assert max(lengths[:15]) <= 600 < lengths[15]
    prompts = [{job.prompt for job in mixture(num, 0.4, seed).jobs} for seed, num in enumerate(CLIENTS)]
    assert sum(map(len, prompts)) == len(set[Any]().union(*prompts))


def test_the_held_out_run_is_an_open_loop_of_independent_chats() -> None:
    workload = chats(5.0, 60.0, seed=2)
    assert len(workload.jobs) == pytest.approx(300, rel=0.15)
    assert all(job.at_s is not None and 40 <= len(job.prompt) <= 200 for job in workload.jobs)


def test_tables_and_checks_say_what_was_found() -> None:
    durations = {name: {"p50": 10.0, "p90": 20.0} for name in ("ttft_ms", "itl_ms", "e2e_ms")}
    found = {
        "real": durations,
        "predicted": durations | {"itl_ms": {"p50": 11.0, "p90": 19.0}},
        "clients": durations,
        "steps": step_errors(CostModel(token_ns=100.0), [timed(1, 0, 100)]),
        "replays": [{"num_plans": 9, "first_difference": None}, {"num_plans": 7, "first_difference": 3}],
    }
    assert "| ITL p50 | 10.0 | 11.0 | +10.0% | 10.0 |" in durations_table(found)
    assert "| ITL p90 | 20.0 | 19.0 | -5.0% | 20.0 |" in durations_table(found)
    assert "| all | 1 | 0.00 | 0.0% | 0.0% | +0.0% |" in steps_table(found)
    assert [(value, good) for _, value, good in replay_checks(found)] == [
        ("9 plans", True),
        ("7 plans, step 3 differs", False),
    ]


def test_a_failed_request_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match="job 0: gone"):
        check(LoadRun("w", 1, [ClientRecord(0, "all", 1, 1, error="gone")]))
