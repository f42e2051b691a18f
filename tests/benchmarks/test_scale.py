"""The made-up trace of the memory benchmark, and a small run of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from benchmarks.scale import simulate, trace_lines

from everystop.sim.traces import read_trace


def test_trace_is_endless_repeatable_and_readable(tmp_path: Path) -> None:
    lines = list(itertools.islice(trace_lines(10**12, 4), 300))
    assert lines == list(trace_lines(300, 4))
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    requests = list(read_trace(tmp_path / "trace.jsonl"))
    assert len({request.tenant for request in requests}) == 8
    assert 40 < sum(bool(request.prefix_ids) for request in requests) < 110


def test_simulation_reads_the_trace_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    results = simulate(trace_lines(200, 4), ["--replicas", "4", "--num-blocks", "64", "--router", "fair"])
    assert results["num_finished"] == 200
    assert results["setup"]["num_replicas"] == 4
    assert results["cpu_s"] > 0
    assert results["peak_mb"] > 10  # no bound from above: what starts a process lends it its own peak
