"""Prometheus' text format of what is counted; knows how a metric is written, and counts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from everystop.observe.catalogue import FAMILIES
from everystop.observe.families import Family, Kind, Sum, Value
from everystop.observe.histogram import Histogram
from everystop.observe.metrics import Metrics
from everystop.observe.vllm_names import FAMILIES_OF_VLLM, PREFIX

ENGINE = "0"
TENANT = ("tenant",)


class Sheet(NamedTuple):
    """Metrics, and where they are read from."""

    families: Sequence[Family[Any]]
    source: Any


def render(metrics: Metrics, model: str, *, only_tenant: str = "", sheets: Iterable[Sheet] = ()) -> bytes:
    """All that has been counted, and what `sheets` add, in version 0.0.4 of the format.

    Samples of the engine carry the model's name. With `only_tenant`, of what is told apart by tenant that one's alone.
    """
    from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    metrics.catch_up()
    own = FAMILIES if metrics.tenants else [family for family in FAMILIES if family.labels != TENANT]
    all_sheets = [Sheet(own, metrics), Sheet(FAMILIES_OF_VLLM, metrics), *sheets]

    class View(Collector):
        """One scrape."""

        def collect(self) -> Iterator[Any]:
            """All families."""
            for families, source in all_sheets:
                yield from (_written(family, source, model, only_tenant) for family in families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(View())
    registry.register(PROCESS_COLLECTOR)
    return generate_latest(registry)


def _common(name: str, model: str) -> dict[str, str]:
    """The labels that all samples of the metric carry."""
    if name.startswith(PREFIX):
        return {"model_name": model, "engine": ENGINE}
    return {"model_name": model} if name.startswith("everystop_") else {}


def _written(family: Family[Any], source: Any, model: str, only_tenant: str) -> Any:
    from prometheus_client import core

    common = _common(family.name, model)
    kinds = {
        Kind.GAUGE: core.GaugeMetricFamily,
        Kind.COUNTER: core.CounterMetricFamily,
        Kind.HISTOGRAM: core.HistogramMetricFamily,
        Kind.SUMMARY: core.SummaryMetricFamily,
    }
    written = kinds[family.kind](family.name, family.text, labels=[*common, *family.labels])
    is_by_tenant = family.labels == TENANT
    for labels, value in family.read(source):
        if is_by_tenant and only_tenant not in ("", *labels):
            continue
        _add(written, [*common.values(), *labels], value, family)
    return written


def _add(written: Any, labels: list[str], value: Value, family: Family[Any]) -> None:
    if isinstance(value, Histogram):
        written.add_metric(labels, buckets=value.cumulative(family.bounds), sum_value=value.total)
    elif isinstance(value, Sum):
        written.add_metric(labels, count_value=value.num, sum_value=value.total)
    else:
        written.add_metric(labels, value)
