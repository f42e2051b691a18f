"""The figures of runs under the names that `vllm bench serve` writes, so that scripts made for it read ours.

TPOT = (E2E − TTFT) / (n − 1) of each answer of n > 1 tokens, ITL each gap between two tokens, E2EL the whole answer;
only requests that ended without an error count. Several runs are summed up as if one had followed the other: counts and
durations add up, latencies are pooled. What has no value is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everystop.observe.comparison import RequestLine, Run
from everystop.observe.distribution import PERCENTILES, percentile
from everystop.observe.goodput import is_demanding, num_good


def bench_keys(runs: Sequence[Run], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of these runs; there must be at least one."""
    good = [line for run in runs for line in run.good]
    num_requests = sum(len(run.requests) for run in runs)
    duration_s = sum(run.duration_s for run in runs)
    num_input, num_output = (sum(getattr(line, f"num_{kind}_tokens") for line in good) for kind in ("prompt", "output"))
    return {
        "date": settings.get("date"),
        "backend": settings.get("backend"),
        "label": runs[0].policy,
        "model_id": settings.get("model_id"),
        "num_prompts": num_requests,
        "request_rate": request_rate(runs[0]),
        "max_concurrency": settings.get("num_clients"),
        "duration": duration_s,
        "completed": len(good),
        "failed": num_requests - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _per(len(good), duration_s),
        "request_goodput": _goodput(runs, settings, duration_s),
        "output_throughput": _per(num_output, duration_s),
        "total_token_throughput": _per(num_input + num_output, duration_s),
        "max_output_tokens_per_s": max(map(_most_tokens_in_a_second, runs)),
        "max_concurrent_requests": max(map(_most_at_once, runs)),
        **_latencies("ttft", (line.ttft_s for line in good)),
        **_latencies("tpot", (line.tpot_s for line in good)),
        **_latencies("itl", (gap_s for line in good for gap_s in line.itl_s)),
        **_latencies("e2el", (line.e2e_s for line in good)),
    }


def request_rate(run: Run) -> float | str:
    """Requests a second of an open loop; "inf" where clients send as soon as they are free."""
    times = [line.scheduled_s for line in run.requests if line.scheduled_s is not None]
    return len(times) / max(times) if len(times) == len(run.requests) and max(times, default=0.0) > 0 else "inf"


def _goodput(runs: Sequence[Run], settings: Mapping[str, Any], duration_s: float) -> float | None:
    """Good requests a second; None without a demand."""
    return _per(sum(num_good(run, settings) for run in runs), duration_s) if is_demanding(settings) else None


def _per(num: int, duration_s: float) -> float | None:
    return num / duration_s if duration_s > 0 else None


def _latencies(name: str, values_s: Iterable[float | None]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles in milliseconds."""
    values = [value * 1e3 for value in values_s if value is not None]
    if not values:
        figures: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", *(f"p{p}" for p in PERCENTILES)))
    else:
        mean = math.fsum(values) / len(values)
        ranked = sorted(values)
        figures = {
            "mean": mean,
            "median": percentile(ranked, 50),
            "std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
            **{f"p{p}": percentile(ranked, p) for p in PERCENTILES},
        }
    return {f"{figure}_{name}_ms": value for figure, value in figures.items()}


def _most_tokens_in_a_second(run: Run) -> int:
    """Over whole seconds from the run's start."""
    counts: dict[int, int] = {}
    for line in run.requests:
        for at_s in line.token_s:
            counts[int(at_s)] = counts.get(int(at_s), 0) + 1
    return max(counts.values(), default=0)


def _most_at_once(run: Run) -> int:
    """Requests that had been sent and were not over; one that ends makes place before another is sent."""
    sent = [line for line in run.requests if line.sent_s >= 0 and line.end_s >= line.sent_s]
    return _highest([(line.sent_s, 1) for line in sent] + [(line.end_s, -1) for line in sent])


def _highest(changes: list[tuple[float, int]]) -> int:
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def arrival_lags_s(lines: Iterable[RequestLine]) -> list[float]:
    """How late each timed request was sent: the generator's own fault."""
    return [line.sent_s - line.scheduled_s for line in lines if line.scheduled_s is not None and line.sent_s >= 0]
