"""Presets, and prompts made of a trace."""

from __future__ import annotations

import pytest

from everystop.sim.traces import TraceRequest
from everystop.sim.workloads import FIRST_ID, LAST_ID, read_workload
from everystop.trial.presets import DEFAULT, PRESETS
from everystop.trial.traced import traced_workload


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_small_and_the_same_for_a_seed(name: str) -> None:
    preset = PRESETS[name]
    workload = preset.workload(name, 7)
    assert workload == preset.workload(name, 7)
    assert workload.jobs != preset.workload(name, 8).jobs
    assert workload.name == name
    assert read_workload(workload.lines()) == workload
    assert len(workload.jobs) <= 64
    assert sum(job.max_tokens for job in workload.jobs) <= 8000
    assert sum(len(job.prompt) for job in workload.jobs) <= 30_000


def test_the_default_has_one_long_answer_in_each_batch() -> None:
    preset = PRESETS[DEFAULT]
    jobs = preset.workload(DEFAULT, 7).jobs
    assert [job.max_tokens for job in jobs] == ([300] + [20] * 15) * 4
    assert preset.max_num_seqs == 16


def test_low_load_is_an_open_loop() -> None:
    workload = PRESETS["low-load"].workload("low-load", 7)
    assert workload.num_clients == 0
    assert len(workload.jobs) > 5
    assert all(job.at_s is not None for job in workload.jobs)


def request(arrival_s: float, num_prompt: int, *ids: int, **fields: object) -> TraceRequest:
    return TraceRequest(
        arrival_ns=round(arrival_s * 1e9),
        num_prompt_tokens=num_prompt,
        num_output_tokens=5,
        prefix_ids=ids,
        prefix_id_tokens=8,
        **fields,  # type: ignore[arg-type]
    )


def test_a_trace_becomes_an_open_loop_with_its_lengths_times_tenants_and_targets() -> None:
    trace = [request(0, 3), request(0.5, 4, tenant="gold", ttft_target_ns=1_500_000_000)]
    workload = traced_workload("t", trace)
    first, second = workload.jobs
    assert workload.num_clients == 0
    assert (first.at_s, len(first.prompt), first.max_tokens, first.group, first.tenant) == (0.0, 3, 5, "all", "")
    assert (second.at_s, second.group, second.tenant, second.ttft_target_ms) == (0.5, "gold", "gold", 1500.0)
    assert second.itl_target_ms is None
    assert all(FIRST_ID <= token <= LAST_ID for job in workload.jobs for token in job.prompt)


def test_prompts_are_equal_exactly_as_far_as_their_prefix_ids_are() -> None:
    a, b, c, d = (job.prompt for job in traced_workload("t", [
        request(0, 20, 1, 2, 3), request(1, 30, 1, 2, 4), request(2, 14, 1, 2), request(3, 20)
    ]).jobs)  # fmt: skip
    assert (len(a), len(b), len(c), len(d)) == (20, 30, 14, 20)
    assert a[:16] == b[:16]
    assert a[16] != b[16]
    assert c == a[:14], "an id names the prompt up to its end, wherever the prompt ends"
    assert not set(a) & set(d)


def test_what_no_prefix_id_covers_is_the_requests_own() -> None:
    a, b = (job.prompt for job in traced_workload("t", [request(0, 12, 1), request(1, 12, 1)]).jobs)
    assert a[:8] == b[:8]
    assert a[8:] != b[8:]
