"""What is counted, as Prometheus reads it; knows which labels go with which name, and counts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from everystop.observe.catalogue import FAMILIES
from everystop.observe.exposition import head, sample
from everystop.observe.families import Family, Kind
from everystop.observe.metrics import Metrics
from everystop.observe.vllm_names import FAMILIES_OF_VLLM, PREFIX

ENGINE = "0"
TENANT = ("tenant",)


class Sheet(NamedTuple):
    """Metrics, and where they are read from."""

    families: Sequence[Family[Any]]
    source: Any


def render(metrics: Metrics, model: str, *, only_tenant: str | None = None, sheets: Iterable[Sheet] = ()) -> bytes:
    """All that has been counted, what `sheets` add, and the process, in version 0.0.4 of the format.

    Samples of the engine carry the model's name. With `only_tenant`, of what is told apart by tenant that one's alone,
    and nothing for "".
    """
    metrics.catch_up()
    own = FAMILIES if metrics.tenants else [family for family in FAMILIES if family.labels != TENANT]
    return render_sheets((Sheet(own, metrics), Sheet(FAMILIES_OF_VLLM, metrics), *sheets), model, only_tenant)


def render_sheets(sheets: Iterable[Sheet], model: str | None = None, only_tenant: str | None = None) -> bytes:
    """What these sheets hold, and the process; samples carry no model's name where there is none yet."""
    lines: list[str] = []
    for families, source in sheets:
        for family in families:
            lines += _family(family, source, model, only_tenant)
    lines += _process()
    return "".join(lines).encode()


def _family(family: Family[Any], source: Any, model: str | None, only_tenant: str | None) -> Iterator[str]:
    common = _common(family.name, model)
    yield head(family.name, family.text, family.kind)
    for values, value in family.read(source):
        if family.labels == TENANT and only_tenant not in (None, *values):
            continue
        labels = common | dict(zip(family.labels, values, strict=True))
        yield from sample(family.name, labels, value, family.bounds)


def _common(name: str, model: str | None) -> dict[str, str]:
    """The labels that all samples of the metric carry."""
    if model is None:
        return {}
    if name.startswith(PREFIX):
        return {"model_name": model, "engine": ENGINE}
    return {"model_name": model} if name.startswith("everystop_") else {}


def _process() -> Iterator[str]:
    """CPU time, memory and files of this process, as Prometheus' clients name them."""
    from prometheus_client import PROCESS_COLLECTOR

    for metric in PROCESS_COLLECTOR.collect():
        kind = Kind(metric.type)
        yield head(metric.samples[0].name, metric.documentation, kind)
        for each in metric.samples:
            yield from sample(each.name, each.labels, each.value, None)
