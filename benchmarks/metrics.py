"""What metrics cost beside the step: CPU time of a scrape, of counting an HTTP request, and of finding out where the
time of an answered request went.

    python -m benchmarks.metrics        # seconds; `benchmarks.recorder` has the cost a step

Times are CPU times, the median over repeats. A request of HTTP is one of an application that answers at once, with and
without the counter around it, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from benchmarks.recorder import NUM_BLOCKS, NUM_ROWS, Run, count, microseconds_a_step, run_steps
from everystop.core.events import FinishEvent
from everystop.observe.history import History
from everystop.observe.life import life_of
from everystop.observe.metrics import Metrics
from everystop.observe.prometheus import render
from everystop.server.edge import Edge
from everystop.server.edge_metrics import HTTP_FAMILIES
from everystop.server.http_counts import HttpCounts

REPEATS, NUM_REQUESTS, NUM_STEPS = 9, 2_000, 1_000


def cpu_us(work: Callable[[], None], num: int) -> float:
    """Microseconds of CPU time of one of `num`."""
    start_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - start_ns) / num / 1e3


def filled(run: Run) -> Metrics:
    """Metrics that have counted a run."""
    metrics = Metrics(NUM_BLOCKS, num_slots=NUM_ROWS)
    for events in run.events:
        metrics.receive(events)
    metrics.catch_up()
    return metrics


def scrape_us(metrics: Metrics) -> tuple[float, int]:
    """One scrape, and its bytes."""
    size = len(render(metrics, "model"))
    return statistics.median(cpu_us(lambda: render(metrics, "model"), 1) for _ in range(REPEATS * 3)), size


def application() -> Starlette:
    """A route that answers at once."""

    async def answer(request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    return Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])


async def ask(app: ASGIApp, num: int) -> None:
    """So many requests, one after the other."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"2")]

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        pass

    for _ in range(num):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await app(scope, receive, send)


def http_us() -> tuple[float, float]:
    """An HTTP request through the routing alone, and what the edge adds, as the median of the differences."""
    inner = application()
    counted = Edge(inner, HttpCounts(), inner.routes, lambda path: False)
    pairs = []
    for repeat in range(REPEATS + 1):
        both = [cpu_us(lambda app=app: asyncio.run(ask(app, NUM_REQUESTS)), NUM_REQUESTS) for app in (inner, counted)]
        if repeat:
            pairs.append(both)
    return statistics.median(a for a, _ in pairs), statistics.median(b - a for a, b in pairs)


def life_us(run: Run) -> tuple[float, float]:
    """Finding out where the time of one request went, and how many tokens the answers had."""
    history = History(num_finished=100_000)
    for events in run.events:
        history.receive(events)
    history.catch_up()
    ends = [event for events in run.events for event in events if isinstance(event, FinishEvent)]
    trails = [history.trails[end.request_id] for end in ends]

    def cut() -> None:
        for trail in trails:
            life_of(history, trail, history.last_ns)

    cost_us = statistics.median(cpu_us(cut, len(trails)) for _ in range(REPEATS))
    return cost_us, statistics.mean(end.num_output_tokens for end in ends)


def main() -> None:
    """Print the costs."""
    run = run_steps(NUM_STEPS)
    print(f"a step of {run.num_rows:.1f} rows counted: {microseconds_a_step(count, run):.1f} µs")
    scrape, size = scrape_us(filled(run))
    print(f"a scrape: {scrape / 1e3:.1f} ms for {size / 1e3:.0f} kB")
    plain, added = http_us()
    print(
        f"an HTTP request through the routing: {plain:.1f} µs; edge and {len(HTTP_FAMILIES)} metrics: {added:+.1f} µs"
    )
    life, num_tokens = life_us(run)
    print(f"where the time of an answer of {num_tokens:.0f} tokens went: {life:.0f} µs")


if __name__ == "__main__":
    main()
