"""What a metric is, apart from how it is written: its name, kind, labels and meaning, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from everystop.observe.histogram import Histogram

S = TypeVar("S")


class Kind(StrEnum):
    """Prometheus' types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


class Sum(NamedTuple):
    """A summary without quantiles: how many values, and their sum."""

    num: int
    total: float


Value = float | Histogram | Sum
Labelled = Iterable[tuple[tuple[str, ...], Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[S]):
    """One metric of a source of type S.

    `name` is what a query says (counters with `_total`). `source` names the events or calls that it is counted from.
    `read` gives each sample: the values of `labels`, and a number, or what the kind needs. Of a histogram with
    `bounds` only these are shown.
    """

    name: str
    kind: Kind
    text: str
    source: str
    read: Callable[[S], Labelled]
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] | None = None


def alone(read: Callable[[S], Value]) -> Callable[[S], Labelled]:
    """The one sample of a metric without labels of its own."""
    return lambda source: [((), read(source))]


def each(read: Callable[[S], Mapping[str, Value]]) -> Callable[[S], Labelled]:
    """A sample for each value of the one label."""
    return lambda source: [((str(key),), value) for key, value in read(source).items()]
