"""Curves of a run, as points to draw: slots at work, tokens so far, and how durations are spread over requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from everystop.observe.comparison import RequestLine, Run
from everystop.observe.distribution import percentile
from everystop.observe.report.lanes import step_begins

Points = list[tuple[float, float]]
QUANTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Measure:
    """A duration that requests have: its name, and the values of a run in seconds, one or several a request."""

    key: str
    label: str
    meaning: str
    values: Callable[[Run], list[float]]


def queue_s(run: Run) -> list[float]:
    """From arrival to boarding for the first time, of each request that boarded; nothing without a history."""
    if run.history is None:
        return []
    trails = run.history.trails.values()
    return [(t.admits[0].now_ns - t.arrival.now_ns) / 1e9 for t in trails if t.admits and t.arrival is not None]


def _each(value: Callable[[RequestLine], float | None]) -> Callable[[Run], list[float]]:
    return lambda run: [found for line in run.good if (found := value(line)) is not None]


MEASURES = (
    Measure("ttft", "TTFT", "from sending to the first token", _each(lambda line: line.ttft_s)),
    Measure("itl", "ITL", "gap between tokens", lambda run: [gap for line in run.good for gap in line.itl_s]),
    Measure("e2e", "E2E", "from sending to the end", _each(lambda line: line.e2e_s)),
    Measure("queue", "queue time", "from arrival to boarding", queue_s),
)


def slots_at_work(run: Run) -> Points:
    """How many slots compute a row that is kept, as (seconds, number) from when on; ends with 0."""
    if run.history is None:
        return []
    steps = run.history.steps.since(0)
    points: Points = [(0.0, 0.0)]
    landed_ns = run.start_ns
    for step, begin_ns in zip(steps, step_begins(steps), strict=True):
        if not step.num_rows:
            continue
        if begin_ns > landed_ns:
            points.append((run.seconds(landed_ns), 0.0))
        points.append((run.seconds(begin_ns), float(step.num_rows - step.num_padded_rows)))
        landed_ns = step.now_ns
    return [*points, (run.seconds(landed_ns), 0.0)]


def averaged(points: Points, bin_s: float) -> Points:
    """A step curve with at most one value in each bin: the mean over it. Curves that have fewer stay as they are."""
    if not points or len(points) * bin_s <= points[-1][0]:
        return points
    result: Points = []
    index, end_s = 0, points[-1][0]
    for number in range(int(end_s / bin_s) + 1):
        low, high = number * bin_s, min((number + 1) * bin_s, end_s)
        if high > low:
            index = max(bisect_right(points, (low, float("inf"))) - 1, 0)
            result.append((low, area(points[index:], low, high) / (high - low)))
    return [*result, (end_s, 0.0)]


def area(points: Sequence[tuple[float, float]], low: float, high: float) -> float:
    """The integral of a step curve from `low` to `high`; it is 0 before its first point."""
    total = 0.0
    for (start, value), (end, _) in pairwise([*points, (float("inf"), 0.0)]):
        if start >= high:
            break
        if end > low:
            total += value * (min(end, high) - max(start, low))
    return total


def tokens_so_far(run: Run) -> Points:
    """Output tokens delivered, as (seconds, number) from when on."""
    times = sorted(at_s for line in run.good for at_s in line.token_s)
    return [(0.0, 0.0), *zip(times, accumulate(1.0 for _ in times), strict=True)]


def thinned(points: Points, most: int) -> Points:
    """At most so many points, evenly chosen, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def spread(values: Sequence[float]) -> Points:
    """The empirical distribution: (value, share of values up to it)."""
    return [(value, rank / len(values)) for rank, value in enumerate(sorted(values), 1)]


def quantiles(values: Sequence[float]) -> dict[int, float]:
    """p50, p95 and p99."""
    return {percent: percentile(values, percent) for percent in QUANTILES}


def sampled(points: Points, times: Sequence[float]) -> Iterator[float]:
    """The step curve's value at each time."""
    for at_s in times:
        index = bisect_right(points, (at_s, float("inf"))) - 1
        yield points[index][1] if index >= 0 else 0.0
