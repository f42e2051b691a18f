"""The flag for traces without the extra, and the headers that carry a caller's trace."""

from __future__ import annotations

import pytest

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.server import tracing
from everystop.server.tracing import MAX_CHARS, trace_context


def test_without_the_flag_nothing_is_asked_for() -> None:
    assert tracing.tracing(None, "m") is None


def test_the_flag_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MODULES", ("opentelemetry.of_no_kind",))
    with pytest.raises(ConfigError, match=r"everystop\[otel\]"):
        tracing.tracing("http://localhost:4318", "m")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4318",
        "grpc://localhost:4317",
        "http://",
        "http://a b",
        "http://a/?x=1",
        "http://a:99999",
        "http://a:0",
        "http://[a",
        "",
    ],
)
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Config(otlp_traces_endpoint=url)


def test_traces_need_remembered_requests() -> None:
    with pytest.raises(ConfigError, match="--explain-history"):
        Config(otlp_traces_endpoint="http://localhost:4318", explain_history=0)


def test_only_the_headers_of_a_trace_are_kept_and_only_short_ones() -> None:
    names = frozenset({b"traceparent", b"tracestate"})
    headers = [(b"traceparent", b"00-a"), (b"authorization", b"x"), (b"tracestate", b"y" * (MAX_CHARS + 1))]
    assert trace_context({"headers": headers}, names) == {"traceparent": "00-a"}
    assert trace_context({"headers": headers[1:]}, names) is None
    assert trace_context({"headers": headers}, frozenset()) is None
