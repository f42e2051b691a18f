"""Counts HTTP requests by route, method and status; knows nothing of what is asked or answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from everystop.core.durations import NS_PER_S
from everystop.observe.buckets import HTTP_S
from everystop.observe.families import Family, Kind, Labelled, Sum
from everystop.observe.histogram import Histogram

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
LEFT = 499  # the client went before there was an answer


class HandlerCounts:
    """The requests of one method to one handler; sizes are those of bodies that announced their length."""

    __slots__ = ("duration", "request_bytes", "response_bytes", "statuses")

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.duration = Histogram(HTTP_S, NS_PER_S)
        self.request_bytes = Sum(0, 0)
        self.response_bytes = Sum(0, 0)


class HttpCounts:
    """What has been asked and answered; `errors` counts the errors that were answered, by the name of their class."""

    def __init__(self) -> None:
        self.by_handler: dict[tuple[str, str], HandlerCounts] = {}
        self.errors: Counter[str] = Counter()
        self.num_open = 0

    def note_refused(self, error: Exception) -> None:
        """What was no request was answered with an error."""
        self.errors[type(error).__name__] += 1

    def of(self, handler: str, method: str) -> HandlerCounts:
        """The counts of one handler."""
        counts = self.by_handler.get((handler, method))
        if counts is None:
            counts = self.by_handler[handler, method] = HandlerCounts()
        return counts

    def note(self, handler: str, scope: Scope, status: int, duration_ns: int) -> None:
        """A request is over: a dozen additions, and nothing an event of a stream. `content_length` is left in the scope
        by whoever begins the answer (`note_start`), `error` by whoever answers an error.
        """
        counts = self.of(handler, scope["method"] if scope["method"] in METHODS else OTHER)
        counts.statuses[status] += 1
        counts.duration.add(duration_ns)
        num_bytes = announced_bytes(scope["headers"])
        if num_bytes is not None:
            counts.request_bytes = _with(counts.request_bytes, num_bytes)
        num_bytes = scope.get("content_length")
        if num_bytes is not None:
            counts.response_bytes = _with(counts.response_bytes, num_bytes)
        error = scope.get("error")
        if error is not None:
            self.errors[error] += 1


class Handlers:
    """Names the handler of a request by the pattern of its route, `other` where there is none: a bounded number of
    names, whatever paths are asked for. All files of the dashboard go by one name.
    """

    def __init__(self, routes: Iterable[BaseRoute], is_file: Callable[[str], bool]) -> None:
        self._by_path: dict[str, str] = {}
        self._by_endpoint: dict[Any, str] = {}
        for route in routes:
            if not isinstance(route, Route):
                continue
            if "{" in route.path:
                self._by_endpoint[route.endpoint] = route.path
            else:
                self._by_path[route.path] = "/ui/{file}" if is_file(route.path) else route.path

    def name(self, scope: Scope) -> str:
        """The handler's name, known at the end of a request, when it has been routed."""
        return self._by_path.get(scope["path"]) or self._by_endpoint.get(scope.get("endpoint"), OTHER)


def note_start(scope: Scope, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """An answer begins: tell the counter, by the scope."""
    scope["status"] = status
    scope["content_length"] = announced_bytes(headers)


def announced_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """How long a body is said to be; None where it is not said."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def _with(total: Sum, num_bytes: int) -> Sum:
    return Sum(total.num + 1, total.total + num_bytes)


def _requests(counts: HttpCounts) -> Labelled:
    for (handler, method), one in counts.by_handler.items():
        for status, num in one.statuses.items():
            yield (handler, method, str(status)), num


def _each(read: Callable[[HandlerCounts], Histogram | Sum]) -> Callable[[HttpCounts], Labelled]:
    def samples(counts: HttpCounts) -> Iterator[tuple[tuple[str, ...], Histogram | Sum]]:
        for (handler, method), one in counts.by_handler.items():
            yield (handler, method), read(one)

    return samples


BY_HANDLER = ("handler", "method")
SOURCE = "the end of an HTTP request"
HTTP_FAMILIES: tuple[Family[HttpCounts], ...] = (
    Family(
        name="http_requests_total",
        kind=Kind.COUNTER,
        text="Requests by route, method and status; 499 is a client that left before its answer began",
        source=SOURCE,
        read=_requests,
        labels=(*BY_HANDLER, "status"),
    ),
    Family(
        name="http_request_duration_seconds",
        kind=Kind.HISTOGRAM,
        text="Headers read to the end of the answer",
        source=SOURCE,
        read=_each(lambda one: one.duration),
        labels=BY_HANDLER,
    ),
    Family(
        name="http_request_size_bytes",
        kind=Kind.SUMMARY,
        text="Bodies of requests that announced their length",
        source=SOURCE,
        read=_each(lambda one: one.request_bytes),
        labels=BY_HANDLER,
    ),
    Family(
        name="http_response_size_bytes",
        kind=Kind.SUMMARY,
        text="Bodies of answers that announced their length, which streams do not",
        source=SOURCE,
        read=_each(lambda one: one.response_bytes),
        labels=BY_HANDLER,
    ),
    Family(
        name="everystop_http_errors_total",
        kind=Kind.COUNTER,
        text="Errors that were the answer to a request, or to what was none, by the name of the error",
        source=SOURCE,
        read=lambda counts: [((name,), num) for name, num in counts.errors.items()],
        labels=("error",),
    ),
    Family(
        name="everystop_http_requests_open",
        kind=Kind.GAUGE,
        text="Requests whose headers have been read and whose answer has not ended",
        source="HTTP",
        read=lambda counts: [((), counts.num_open)],
    ),
)
