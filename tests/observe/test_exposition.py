"""Prometheus' text format, against the client library that everybody uses."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, core, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from everystop.core.durations import NS_PER_S
from everystop.observe.exposition import head, sample
from everystop.observe.families import Kind, Sum
from everystop.observe.histogram import Histogram


def written(kind: Kind, labels: dict[str, str], value: float | Histogram | Sum, name: str = "name") -> str:
    return head(name, 'A "text"\nwith a \\', kind) + "".join(sample(name, labels, value, None))


class One:
    """A collector of one family of the client library."""

    def __init__(self, family: object) -> None:
        self.family = family

    def collect(self) -> list[object]:
        return [self.family]


def by_library(family: object) -> str:
    registry = CollectorRegistry()
    registry.register(One(family))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


TEXT = 'A "text"\nwith a \\'
LABELS: list[dict[str, str]] = [
    {},
    {"model_name": "m"},
    {"zone": 'a "b"\n\\c', "engine": "0", "model_name": "é"},
]


@pytest.mark.parametrize("labels", LABELS)
def test_lines_are_those_of_the_client_library(labels: dict[str, str]) -> None:
    names, values = list(labels), list(labels.values())
    gauge = core.GaugeMetricFamily("name", TEXT, labels=names)
    gauge.add_metric(values, 0.25)
    assert written(Kind.GAUGE, labels, 0.25) == by_library(gauge)
    counter = core.CounterMetricFamily("name_total", TEXT, labels=names)
    counter.add_metric(values, 7)
    assert written(Kind.COUNTER, labels, 7, "name_total") == by_library(counter)
    summary = core.SummaryMetricFamily("name", TEXT, labels=names)
    summary.add_metric(values, 3, 12)
    assert written(Kind.SUMMARY, labels, Sum(3, 12)) == by_library(summary)
    histogram = Histogram((0.5, 1.0, 2560.0), NS_PER_S)
    for seconds in (0.2, 0.5, 3, 9000):
        histogram.add(round(seconds * NS_PER_S))
    family = core.HistogramMetricFamily("name", TEXT, labels=names)
    family.add_metric(values, buckets=histogram.cumulative(), sum_value=histogram.total)
    assert written(Kind.HISTOGRAM, labels, histogram) == by_library(family)


def test_only_some_bounds_are_written() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.add(3)
    lines = list(sample("n", {"model_name": "m"}, histogram, (2.0,)))
    assert lines[:2] == ['n_bucket{le="2.0",model_name="m"} 0.0\n', 'n_bucket{le="+Inf",model_name="m"} 1.0\n']


def test_large_values_are_read_back_exactly() -> None:
    for value in (2.0**53, 1e-9, 123456789012.5):
        (family,) = text_string_to_metric_families(written(Kind.GAUGE, {}, value))
        assert family.samples[0].value == value
