"""What the server knows of tracing: which headers carry a caller's trace, and how to begin, if the extra is there."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

from starlette.types import Scope

from everystop.core.errors import ConfigError
from everystop.observe.history import Client, History
from everystop.observe.life import Life

MAX_CHARS = 512  # of a header that carries a trace, as https://www.w3.org/TR/trace-context/ asks for at least
MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


class Tracer(Protocol):
    """Makes and sends traces; see `observe.otel.export.Traces`."""

    headers: frozenset[bytes]

    def note(self, client: Client, life: Life | None) -> None:
        """A request was answered."""

    def close(self, timeout_s: float = ...) -> None:
        """Send what is left."""


def tracing(endpoint: str | None, model: str) -> Callable[[History], Tracer] | None:
    """What opens the traces of a history, None where none are wanted; raises ConfigError where the extra is missing,
    or the environment asks for what cannot be done.
    """
    if endpoint is None:
        return None
    if not all(_is_installed(module) for module in MODULES):
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry's SDK and its exporter, which are not installed; install the "
            "extra, everystop[otel], or leave the flag out"
        )
    from everystop.observe.otel import export

    export.check_environment()
    return lambda history: export.open_traces(endpoint, history, model)


def trace_context(scope: Scope, names: frozenset[bytes]) -> dict[str, str] | None:
    """The headers of a request by which a trace goes on; None where nothing is traced, or there are none."""
    if not names:
        return None
    found = {
        name.decode("ascii"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in names and len(value) <= MAX_CHARS
    }
    return found or None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
