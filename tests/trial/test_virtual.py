from __future__ import annotations

import itertools
from typing import Any

import pytest

from everystop.config import Config
from everystop.observe.comparison import Run
from everystop.sim.cost import CostModel
from everystop.sim.workloads import Job, Workload
from everystop.trial.virtual import VirtualRun

COST = CostModel(step_ns=1e6)  # every step takes a millisecond, whatever is in it


FIRST_IDS = itertools.count(1000)  # no two prompts begin alike


def make_job(num_prompt: int, num_output: int, at_s: float | None = None) -> Job:
    return Job(prompt=(next(FIRST_IDS), *range(num_prompt - 1)), max_tokens=num_output, at_s=at_s)


def play(workload: Workload, num_blocks: int = 64, **flags: Any) -> Run:
    config = Config(**{"max_num_seqs": 2, **flags})
    return VirtualRun(workload, config, COST, num_blocks=num_blocks).play(config.policy, 0)


def test_tokens_come_once_a_step() -> None:
    run = play(Workload("one", 1, (make_job(4, 3),)))
    assert run.requests[0].token_s == pytest.approx((0.001, 0.002, 0.003))
    assert run.duration_s == pytest.approx(0.003)
    assert run.requests[0].num_output_tokens == 3


def test_a_client_sends_the_next_request_when_its_last_one_is_over() -> None:
    run = play(Workload("closed", 1, (make_job(4, 2), make_job(4, 2))))
    assert [line.sent_s for line in run.requests] == pytest.approx([0.0, 0.002])


def test_a_request_that_comes_during_a_step_keeps_its_time() -> None:
    run = play(Workload("open", 0, (make_job(4, 4, 0.0), make_job(4, 1, 0.0015))))
    late = run.requests[1]
    assert late.sent_s == pytest.approx(0.0015)
    assert late.token_s == pytest.approx((0.003,))


def test_time_passes_while_nobody_is_there() -> None:
    run = play(Workload("idle", 0, (make_job(4, 1, 0.0), make_job(4, 1, 5.0))))
    assert run.requests[1].token_s == pytest.approx((5.001,))


def test_a_static_batch_waits_to_fill() -> None:
    run = play(Workload("fill", 0, (make_job(4, 1, 0.0),)), policy="static", batch_wait_ms=50)
    assert run.requests[0].token_s == pytest.approx((0.051,))


def test_a_request_that_cannot_fit_is_an_error_of_its_own() -> None:
    run = play(Workload("big", 1, (make_job(100, 100), make_job(4, 1))), num_blocks=4)
    assert "fit" in (run.requests[0].error or "")
    assert run.requests[1].error is None


def test_the_same_run_comes_out_again() -> None:
    workload = Workload("same", 3, tuple(make_job(4 + i, 3 + i % 5) for i in range(12)))
    assert [line.token_s for line in play(workload).requests] == [line.token_s for line in play(workload).requests]
