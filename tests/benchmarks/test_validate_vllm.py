"""A run that was made by known step times is predicted without error by them, and with one by others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.validate_vllm import RealRun, WholeChunks, compare, describe, simulate

from everystop.core.scheduler import Scheduler
from everystop.sim.cost import CostModel

COST = CostModel(step_ns=10e6, token_ns=50_000, decode_context_ns=100)
ARRIVALS_S = [0.25 * i for i in range(12)]
CLIENT_CLOCK_S, ENGINE_CLOCK_S = 1_700_000_000.0, 5_000.0


def write_run(folder: Path, requests: list[dict[str, object]]) -> RealRun:
    """A run's files, as the benchmark reads them."""
    engine = {
        "model": "meta-llama/Llama-3.1-8B",
        "tensor_parallel_size": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "max_model_len": 2_048,
    }
    meta = {"engine_kwargs": engine, "kv_cache": {"num_gpu_blocks": 300}}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "config.json").write_text(json.dumps({"link_bw": 16, "link_latency": 1_000}))
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
    return RealRun.read(folder)


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    """Twelve requests over three seconds, timed by our own scheduler under `COST`."""
    folder = tmp_path / "RTX4090_Llama-3.1-8B"
    folder.mkdir()
    requests: list[dict[str, object]] = [
        {
            "arrival_time": CLIENT_CLOCK_S + at_s,
            "input_toks": 100 + 60 * (i % 5),
            "output_toks": 20 + i,
            "queued_ts": ENGINE_CLOCK_S + at_s + 0.001 * (i % 3),
            "first_token_ts": 0.0,
            "last_token_ts": 0.0,
        }
        for i, at_s in enumerate(ARRIVALS_S)
    ]
    times, _ = simulate(write_run(folder, requests), COST, Scheduler)
    for request, at_s, ttft_s, e2e_s in zip(requests, ARRIVALS_S, times["TTFT"], times["E2E"], strict=True):
        request |= {
            "first_token_ts": ENGINE_CLOCK_S + at_s + ttft_s,
            "last_token_ts": ENGINE_CLOCK_S + at_s + e2e_s,
        }
    return write_run(folder, requests[::-1])


def test_limits_and_arrivals_are_those_of_the_run(run: RealRun) -> None:
    assert (run.gpu, run.shape.name, run.num_blocks) == ("RTX4090", "llama-3.1-8b", 300)
    assert (run.limits.max_num_seqs, run.limits.max_num_batched_tokens, run.limits.max_model_len) == (4, 256, 2_048)
    assert run.arrivals_ns == [250_000_000 * i for i in range(12)]


def test_step_times_that_made_the_run_are_without_error(run: RealRun) -> None:
    times, scheduler = simulate(run, COST, Scheduler)
    assert scheduler.num_preemptions == 0
    assert max(map(abs, compare(run.times, times).values())) < 1e-6


def test_other_step_times_and_another_rule_show_as_errors(run: RealRun) -> None:
    times, _ = simulate(run, replace(COST, step_ns=20e6), Scheduler)
    errors = compare(run.times, times)
    assert errors["TPOT p50"] == pytest.approx(1, abs=0.4)
    assert errors["TTFT p50"] > 0.2
    times, _ = simulate(run, COST, WholeChunks)
    assert 0 < compare(run.times, times)["TTFT each"] < 0.5


def test_fewer_blocks_cost_time(run: RealRun) -> None:
    times, _ = simulate(replace(run, num_blocks=30), COST, Scheduler)
    assert compare(run.times, times)["TTFT p90"] > 0.5


def test_table_has_a_line_for_each_result(run: RealRun) -> None:
    times, _ = simulate(run, COST, Scheduler)
    named = {"run": run.name, "step times": "known", "chunks": "ours"}
    lines = describe([{**named, **compare(run.times, times)}]).splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("| RTX4090_Llama-3.1-8B | known | ours | ")
    assert lines[-1].count("|") == lines[0].count("|")
