"""Prometheus' text format of `Metrics`; knows their names on the wire, counts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from everystop.observe.metrics import Histogram, Metrics

T = TypeVar("T")


def render(metrics: Metrics, model: str, *, only_tenant: str = "") -> bytes:
    """All that has been counted, in version 0.0.4 of the format; each sample carries the model's name. With
    `only_tenant`, of what is told apart by tenant that one's alone.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class View(Collector):
        """One scrape."""

        def collect(self) -> Iterator[Any]:
            """All families."""
            return _families(metrics, model, only_tenant)

    registry = CollectorRegistry()
    metrics.catch_up()
    registry.register(View())
    return generate_latest(registry)


def _families(metrics: Metrics, model: str, only_tenant: str) -> Iterator[Any]:
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
    if metrics.tenants:
        yield from _tenant_families(metrics, model, only_tenant)


def _tenant_families(metrics: Metrics, model: str, only_tenant: str) -> Iterator[Any]:
    """What is told apart by tenant: those of the file, and `other`; one alone if it is named."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels = ["model_name", "tenant"]
    for name, text, counts in _tenant_gauges(metrics):
        gauge = GaugeMetricFamily(f"everystop_tenant_{name}", text, labels=labels)
        for tenant, value in _shown(counts, only_tenant):
            gauge.add_metric([model, tenant], value)
        yield gauge
    for name, text, counts in _tenant_counters(metrics):
        counter = CounterMetricFamily(f"everystop_tenant_{name}", text, labels=labels)
        for tenant, value in _shown(counts, only_tenant):
            counter.add_metric([model, tenant], value)
        yield counter
    text = "Arrival in the engine to first token"
    histogram = HistogramMetricFamily("everystop_tenant_time_to_first_token_seconds", text, labels=labels)
    for tenant, of_tenant in _shown(metrics.tenants, only_tenant):
        data = of_tenant.ttft
        histogram.add_metric([model, tenant], buckets=data.cumulative(), sum_value=data.total)
    yield histogram


def _shown(by_tenant: Mapping[str, T], only_tenant: str) -> Iterator[tuple[str, T]]:
    return ((tenant, each) for tenant, each in by_tenant.items() if only_tenant in ("", tenant))


def _tenant_gauges(metrics: Metrics) -> Iterator[tuple[str, str, dict[str, int]]]:
    yield "num_requests_running", "Requests that hold a slot", metrics.num_by_tenant(is_running=True)
    yield "num_requests_waiting", "Requests that have arrived and do not run", metrics.num_by_tenant(is_running=False)


def _tenant_counters(metrics: Metrics) -> Iterator[tuple[str, str, dict[str, int]]]:
    items = metrics.tenants.items()
    prompt = {tenant: counts.num_prompt_tokens for tenant, counts in items}
    yield "prompt_tokens", "Prompt tokens of requests that brought a token", prompt
    yield "generation_tokens", "Tokens generated", {name: counts.num_generation_tokens for name, counts in items}
    yield "requests_refused", "Requests that were refused", {name: counts.num_refused for name, counts in items}


def _gauges(metrics: Metrics) -> Iterator[tuple[str, str, float]]:
    yield "num_requests_running", "Requests that hold a slot", metrics.num_running
    yield "num_requests_waiting", "Requests that have arrived and do not run", metrics.num_waiting
    yield "kv_cache_usage_perc", "Share of the KV blocks held by requests, 0 to 1", metrics.kv_usage
    yield "kv_cache_blocks", "Blocks of the KV cache", metrics.num_blocks
    yield (
        "step_target_seconds",
        "Latest target on the time of a step, 0 if there was none; under deadline it varies",
        metrics.step_target_s,
    )


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
    over = metrics.num_steps_over_target
    yield "steps_over_target", "Steps planned although predicted to exceed their target, which was out of reach", over


def _labelled_counters(metrics: Metrics) -> Iterator[tuple[str, str, str, dict[str, int]]]:
    yield "request_success", "Requests that ended, by reason", "finished_reason", metrics.finished
    yield "requests_refused", "Requests that were refused, by error", "error", metrics.refused


def _histograms(metrics: Metrics) -> Iterator[tuple[str, str, Histogram]]:
    yield "time_to_first_token_seconds", "Arrival in the engine to first token", metrics.ttft
    yield "inter_token_latency_seconds", "Gap between two tokens of a request", metrics.itl
    yield "e2e_request_latency_seconds", "Arrival in the engine to the end, without aborts", metrics.e2e
    yield "request_queue_time_seconds", "Arrival in the engine to first admission", metrics.queue_time
    yield "step_seconds", "Execution of one step", metrics.step_time
    yield "iteration_tokens", "Tokens computed in one step", metrics.step_tokens
