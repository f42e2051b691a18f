"""Spans through OpenTelemetry's SDK; skipped where the extra is not installed."""

from __future__ import annotations

import gzip
import http.server
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everystop.core.errors import ConfigError
from everystop.observe.history import Client
from everystop.observe.life import life_of

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.observe.runs import MS, Run
from tests.server.parrot import parrot, wait_until

from everystop.observe.otel import export

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETIONS = "/v1/completions"


def answered(run: Run, context: dict[str, str] | None = None) -> tuple[Client, Any]:
    """A request that was answered, with its life."""
    run.now_ns = 10 * MS
    client = Client("cmpl-1", "", 1, 1, run.now_ns - MS, run.now_ns, trace_context=context)
    run.history.add_client(client)
    run.add(1, prompt=8, max_tokens=4)
    run.finish()
    trail = run.history.trails[1]
    assert trail.finish is not None
    client.delivered_ns = trail.finish.now_ns + MS
    return client, life_of(run.history, trail, client.delivered_ns)


def traced(context: dict[str, str] | None = None, *, has_life: bool = True) -> list[Any]:
    """The spans of such a request, the whole of it last."""
    run, memory = Run(), InMemorySpanExporter()
    traces = export.Traces(run.history, SimpleSpanProcessor(memory), "m")
    client, life = answered(run, context)
    traces.note(client, life if has_life else None)
    traces.close()
    assert client.trace_context is None
    return list(memory.get_finished_spans())


def test_phases_are_children_of_the_request() -> None:
    *phases, whole = traced()
    assert whole.name == "llm_request"
    assert [span.name for span in phases] == ["prefill", "decode"]
    assert whole.parent is None
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    assert all(whole.start_time <= span.start_time < span.end_time <= whole.end_time for span in phases)
    assert abs(whole.end_time - whole.start_time - sum(s.end_time - s.start_time for s in phases)) == 2 * MS
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert whole.resource.attributes["service.name"] == "everystop"


def test_times_are_those_of_the_wall_clock() -> None:
    offset_ns = time.time_ns() - time.monotonic_ns()
    whole = traced()[-1]
    assert abs(whole.start_time - 9 * MS - offset_ns) < 60 * 10**9


@pytest.mark.parametrize("flag", ["01", "00"])
def test_the_callers_trace_goes_on_if_it_is_sampled(flag: str) -> None:
    spans = traced({"traceparent": f"00-{TRACE}-{PARENT}-{flag}"})
    if flag == "00":
        assert spans == []
        return
    assert all(format(span.context.trace_id, "032x") == TRACE for span in spans)
    assert format(spans[-1].parent.span_id, "016x") == PARENT


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_a_broken_header_begins_a_trace_of_its_own(header: str) -> None:
    whole = traced({"traceparent": header})[-1]
    assert whole.parent is None
    assert format(whole.context.trace_id, "032x") != TRACE


def test_without_a_life_there_is_the_request_alone() -> None:
    assert [span.name for span in traced(has_life=False)] == ["llm_request"]


def test_the_environment_names_the_service_and_chooses_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert traced()[-1].resource.attributes["service.name"] == "mine"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert traced() == []


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_TRACES_EXPORTER", "zipkin")]
)
def test_what_the_environment_asks_in_vain_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        export.check_environment({name: value})
    export.check_environment({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})


class Collector:
    """Takes traces by HTTP; `spans` are what has come, `paths` where to."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                collector.paths.add(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wholes(self) -> list[Any]:
        """The spans of whole requests."""
        return [span for span in self.spans if span.name == "llm_request"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.server.shutdown()
    running.server.server_close()


def opened(url: str) -> Callable[..., export.Traces]:
    return lambda history: export.open_traces(url, history, "parrot")


def test_a_server_sends_a_trace_of_each_request_to_its_collector(collector: Collector) -> None:
    with parrot(open_traces=opened(collector.url)) as server:
        server.runner.step_s = 0.002
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert server.request("POST", COMPLETIONS, {"prompt": "abcdef"}, header)[0] == 200
        assert server.complete("abc", stream=False)[0] == 200
        wait_until(lambda: server.metric("request_blame_requests_total") == 2)
    wait_until(lambda: len(collector.wholes()) == 2)  # the server gives its collector two seconds, and ends
    wait_until(lambda: collector.paths == {"/v1/traces"})
    mine = next(span for span in collector.wholes() if span.trace_id.hex() == TRACE)
    assert mine.parent_span_id.hex() == PARENT
    assert {span.name for span in collector.spans if span.parent_span_id == mine.span_id} >= {"prefill", "decode"}


def test_a_collector_that_is_gone_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    gone = Collector()
    gone.server.shutdown()
    gone.server.server_close()
    with caplog.at_level(logging.WARNING), parrot(open_traces=opened(gone.url)) as server:
        for _ in range(50):
            assert server.complete("abc")[0] == 200
        wait_until(lambda: server.metric("request_blame_requests_total") == 50)
        assert server.get("/health")[0] == 200
        server.stop()
        assert server.join() == 0
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) <= 2
