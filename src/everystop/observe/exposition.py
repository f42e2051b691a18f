"""Prometheus' text format, version 0.0.4: lines from names, labels and values; knows no metric.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from everystop.observe.families import Kind, Sum, Value
from everystop.observe.histogram import Histogram

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_TEXT_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def head(name: str, text: str, kind: Kind) -> str:
    """The two lines before the samples of a metric."""
    return f"# HELP {name} {text.translate(_TEXT_ESCAPES)}\n# TYPE {name} {kind}\n"


def sample(name: str, labels: Mapping[str, str], value: Value, bounds: Sequence[float] | None) -> Iterator[str]:
    """The lines of one value; labels stand in the order of their names."""
    own = _label_list(labels)
    braced = f"{{{own}}}" if own else ""
    if isinstance(value, Histogram):
        yield from _buckets(name, labels, value, bounds)
        yield f"{name}_count{braced} {float(value.num)}\n"
        yield f"{name}_sum{braced} {value.total}\n"
    elif isinstance(value, Sum):
        yield f"{name}_count{braced} {float(value.num)}\n"
        yield f"{name}_sum{braced} {float(value.total)}\n"
    else:
        yield f"{name}{braced} {float(value)}\n"


def _label_list(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels))


def _buckets(
    name: str, labels: Mapping[str, str], histogram: Histogram, bounds: Sequence[float] | None
) -> Iterator[str]:
    before = _label_list({name: value for name, value in labels.items() if name < "le"})
    after = _label_list({name: value for name, value in labels.items() if name > "le"})
    begin = f'{name}_bucket{{{before}{"," if before else ""}le="'
    end = f'"{"," if after else ""}{after}}} '
    for bound, count in histogram.cumulative(bounds):
        yield f"{begin}{bound}{end}{count}\n"
