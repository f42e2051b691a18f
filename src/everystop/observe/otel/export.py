"""Sends the spans of answered requests to a collector by OTLP over HTTP; only this module needs OpenTelemetry's SDK.

Spans wait in the SDK's bounded queue for a thread of its own: what does not fit is dropped, and a collector that is
slow or gone holds up nobody. The SDK's variables OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
OTEL_PROPAGATORS, OTEL_BSP_… and OTEL_EXPORTER_OTLP_… (headers, timeout, certificates, compression) hold.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from everystop import __version__
from everystop.core.errors import ConfigError
from everystop.observe.history import Client, History
from everystop.observe.life import Life
from everystop.observe.otel import names
from everystop.observe.otel.spans import Span, phases_of, whole_of

DEFAULT_PATH = "/v1/traces"
QUIET_S = 60.0
CLOSE_S = 2.0
ONLY = {
    "OTEL_TRACES_EXPORTER": ("otlp",),
    "OTEL_EXPORTER_OTLP_PROTOCOL": ("http/protobuf",),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": ("http/protobuf",),
}


class Traces:
    """Makes a trace of each answered request. `headers` are those of a request by which its trace goes on.

    A request whose caller has decided not to sample gets none, as the sampler says.
    """

    def __init__(self, history: History, processor: SpanProcessor, model: str) -> None:
        self.headers = frozenset(name.lower().encode() for name in propagate.get_global_textmap().fields)
        self._history = history
        self._model = model
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("everystop", __version__)

    def note(self, client: Client, life: Life | None) -> None:
        """A request was answered; its phases are told only with its life."""
        parent = propagate.extract(client.trace_context or {})
        client.trace_context = None
        offset_ns = time.time_ns() - time.monotonic_ns()
        whole = whole_of(self._history, client, life, self._model)
        span = self._tracer.start_span(
            whole.name,
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes=whole.attributes,
            start_time=whole.start_ns + offset_ns,
        )
        if not span.is_recording():
            return
        if life is not None:
            within = trace.set_span_in_context(span)
            for phase in phases_of(life):
                self._add(phase, within, offset_ns)
        error = whole.attributes.get(names.ERROR)
        if error is not None:
            span.set_status(trace.StatusCode.ERROR, str(error))
        span.end(whole.end_ns + offset_ns)

    def _add(self, phase: Span, within: Context, offset_ns: int) -> None:
        start_ns, end_ns = phase.start_ns + offset_ns, phase.end_ns + offset_ns
        span = self._tracer.start_span(phase.name, context=within, attributes=phase.attributes, start_time=start_ns)
        span.end(end_ns)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, for so long at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="everystop-traces-end", daemon=True)
        closing.start()
        closing.join(timeout_s)


def open_traces(endpoint: str, history: History, model: str) -> Traces:
    """Traces that go to a collector."""
    _be_quiet()
    exporter = OTLPSpanExporter(endpoint=endpoint if urlsplit(endpoint).path.strip("/") else _with_path(endpoint))
    return Traces(history, BatchSpanProcessor(exporter), model)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for a variable of OpenTelemetry that would have to be ignored."""
    for name, able in ONLY.items():
        value = environment.get(name, able[0])
        if value not in able:
            raise ConfigError(
                f"{name} is {value!r}, but --otlp-traces-endpoint sends {able[0]} only; unset the variable, or the flag"
            )


def _with_path(endpoint: str) -> str:
    return endpoint.rstrip("/") + DEFAULT_PATH


def _resource() -> Resource:
    """Who sends: named by the environment, else after the project."""
    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "everystop"}))
    return resource


class _Seldom(logging.Filter):
    """Lets one record a minute pass."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + QUIET_S
        return True


def _be_quiet() -> None:
    """A collector that is gone is said once a minute, not at each try, and without a stack."""
    seldom = _Seldom()
    for name in (OTLPSpanExporter.__module__, BatchSpanProcessor.__module__):
        logging.getLogger(name).addFilter(seldom)
