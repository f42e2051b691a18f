"""Prometheus' text format of `Metrics`; knows their names on the wire, counts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from everystop.observe.metrics import Histogram, Metrics


def render(metrics: Metrics, model: str) -> bytes:
    """All that has been counted, in version 0.0.4 of the format; each sample carries the model's name."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class View(Collector):
        """One scrape."""

        def collect(self) -> Iterator[Any]:
            """All families."""
            return _families(metrics, model)

    registry = CollectorRegistry()
    metrics.catch_up()
    registry.register(View())
    return generate_latest(registry)


def _families(metrics: Metrics, model: str) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels, values = ["model_name"], [model]
    for name, text, value in _gauges(metrics):
        gauge = GaugeMetricFamily(f"everystop_{name}", text, labels=labels)
        gauge.add_metric(values, value)
        yield gauge
    for name, text, value in _counters(metrics):
        counter = CounterMetricFamily(f"everystop_{name}", text, labels=labels)
        counter.add_metric(values, value)
        yield counter
    for name, text, label, counts in _labelled_counters(metrics):
        counter = CounterMetricFamily(f"everystop_{name}", text, labels=[*labels, label])
        for key, value in counts.items():
            counter.add_metric([*values, key], value)
        yield counter
    for name, text, data in _histograms(metrics):
        histogram = HistogramMetricFamily(f"everystop_{name}", text, labels=labels)
        histogram.add_metric(values, buckets=data.cumulative(), sum_value=data.total)
        yield histogram


def _gauges(metrics: Metrics) -> Iterator[tuple[str, str, float]]:
    yield "num_requests_running", "Requests that hold a slot", metrics.num_running
    yield "num_requests_waiting", "Requests that have arrived and do not run", metrics.num_waiting
    yield "kv_cache_usage_perc", "Share of the KV blocks held by requests, 0 to 1", metrics.kv_usage
    yield "kv_cache_blocks", "Blocks of the KV cache", metrics.num_blocks


def _counters(metrics: Metrics) -> Iterator[tuple[str, str, float]]:
    yield "prompt_tokens", "Prompt tokens of requests taken", metrics.num_prompt_tokens
    computed = metrics.num_computed_prompt_tokens
    yield "computed_prompt_tokens", "Prompt tokens computed, again after a preemption", computed
    yield "generation_tokens", "Tokens generated", metrics.num_generation_tokens
    yield "num_preemptions", "Preemptions", metrics.num_preemptions
    yield "preempted_tokens", "Computed tokens lost by preemptions", metrics.num_preempted_tokens
    yield "recomputed_tokens", "Tokens computed again after a preemption", metrics.num_recomputed_tokens
    restored = metrics.num_restored_tokens
    yield "restored_tokens", "Tokens that resumed requests found in the prefix cache; no prefix_cache_hits", restored
    yield "prefix_cache_queries", "Tokens looked up in the prefix cache", metrics.num_prefix_queries
    yield "prefix_cache_hits", "Tokens taken from the prefix cache", metrics.num_prefix_hits
    yield "evicted_blocks", "Cached KV blocks given to others", metrics.num_evicted_blocks
    yield "steps", "Steps executed", metrics.num_steps


def _labelled_counters(metrics: Metrics) -> Iterator[tuple[str, str, str, dict[str, int]]]:
    yield "request_success", "Requests that ended, by reason", "finished_reason", metrics.finished
    yield "requests_refused", "Requests that could never fit, by error", "error", metrics.refused


def _histograms(metrics: Metrics) -> Iterator[tuple[str, str, Histogram]]:
    yield "time_to_first_token_seconds", "Arrival in the engine to first token", metrics.ttft
    yield "inter_token_latency_seconds", "Gap between two tokens of a request", metrics.itl
    yield "e2e_request_latency_seconds", "Arrival in the engine to the end, without aborts", metrics.e2e
    yield "request_queue_time_seconds", "Arrival in the engine to first admission", metrics.queue_time
    yield "step_seconds", "Execution of one step", metrics.step_time
    yield "iteration_tokens", "Tokens computed in one step", metrics.step_tokens
