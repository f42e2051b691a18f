"""The tables of a report: the figures of each picture, all requests, and all figures under their usual names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from everystop.observe.bench_keys import bench_keys
from everystop.observe.comparison import Comparison, RequestLine, Run
from everystop.observe.report.curves import (
    MEASURES,
    Points,
    area,
    quantiles,
    sampled,
    slots_at_work,
    thinned,
    tokens_so_far,
)
from everystop.observe.report.request_pictures import Change, changes
from everystop.observe.report.shown import shown_runs
from everystop.observe.report.use_picture import slot_shares
from everystop.words import in_time, percent, significant

MAX_ROWS = 500
NUM_SPANS = 10


@dataclass(frozen=True, slots=True)
class Table:
    """A table: heads, and rows of cells."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request in the table: `times` are medians over repeats of E2E by policy, `gain` of the last policy."""

    index: int
    group: str
    num_prompt_tokens: int
    num_output_tokens: int
    sent_s: float
    times: tuple[float | None, ...]
    gain: float | None


@dataclass(frozen=True, slots=True)
class Requests:
    """The table of requests, and what must be said of it."""

    rows: tuple[RequestRow, ...]
    note: str


def picture_table(comparison: Comparison, name: str) -> Table | None:
    """The figures of a picture; None where the table of requests has them."""
    runs = shown_runs(comparison)
    match name:
        case "slots":
            return _slots_table(runs)
        case "occupancy":
            return _over_time(runs, "slots at work, on average", [slots_at_work(run) for run in runs], _mean_over)
        case "tokens":
            return _over_time(runs, "output tokens in the end", [tokens_so_far(run) for run in runs], _added_in)
        case "durations":
            return _durations_table(comparison)
        case "slot-time":
            shares = {policy: slot_shares(comparison.runs_of(policy)) for policy in comparison.policies}
            uses = next(iter(shares.values()))
            rows = tuple((use, *(f"{of.get(use, 0.0) * 100:.1f} %" for of in shares.values())) for use in uses)
            return Table(("use of slot time", *shares), rows)
    return None


def _slots_table(runs: Sequence[Run]) -> Table:
    heads = (
        "policy",
        "slots",
        "steps",
        "time for all requests",
        "decode",
        "prefill",
        "held",
        "padding",
        "idle",
        "overhead",
    )
    rows = []
    for run in runs:
        shares = slot_shares([run])
        steps = sum(1 for step in run.history.steps.since(0) if step.num_rows) if run.history else 0
        cells = (percent(shares.get(use, 0.0)) for use in heads[4:])
        rows.append((run.policy, str(run.max_num_seqs), f"{steps:,}", in_time(run.duration_s), *cells))
    return Table(heads, tuple(rows))


def _over_time(
    runs: Sequence[Run], what: str, curves: Sequence[Points], value: Callable[[Points, float, float], str]
) -> Table:
    """A row for each tenth of the longest run; `value` reads a curve from one time to the next."""
    end_s = max(run.duration_s for run in runs)
    times = [end_s * i / NUM_SPANS for i in range(NUM_SPANS + 1)]
    rows = tuple(
        (f"{in_time(low)} to {in_time(high)}", *(value(points, low, high) for points in curves))
        for low, high in pairwise(times)
    )
    return Table(("time", *(f"{run.policy}: {what}" for run in runs)), rows)


def _mean_over(points: Points, low: float, high: float) -> str:
    return f"{area(points, low, high) / max(high - low, 1e-9):,.1f}"


def _added_in(points: Points, low: float, high: float) -> str:
    before, after = sampled(points, (low, high + 1e-6))
    return f"{after:,.0f} (+{after - before:,.0f})"


def _durations_table(comparison: Comparison) -> Table:
    rows = []
    for measure in MEASURES:
        for policy in comparison.policies:
            values = [value for run in comparison.runs_of(policy) for value in measure.values(run)]
            if values:
                cells = (in_time(value) for value in quantiles(values).values())
                rows.append((f"{measure.label}: {measure.meaning}", policy, f"{len(values):,}", *cells))
    return Table(("duration", "policy", "values", "p50", "p95", "p99"), tuple(rows))


def bench_table(comparison: Comparison) -> Table:
    """All figures under the names of vLLM's benchmark."""
    policies = [policy for policy in comparison.policies if comparison.runs_of(policy)]
    columns = [bench_keys(comparison.runs_of(policy), comparison.settings) for policy in policies]
    skipped = ("date", "backend", "label", "model_id")
    keys = [key for key in (columns[0] if columns else ()) if key not in skipped]
    rows = tuple((key, *(_cell(column[key]) for column in columns)) for key in keys)
    return Table(("figure", *policies), rows)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return significant(value, 4)
    return f"{value:,}" if isinstance(value, int) else str(value)


def request_rows(comparison: Comparison) -> list[RequestRow]:
    """All requests in the order of the workload."""
    found: dict[str, dict[int, Change]] = {
        policy: {change.index: change for change in changes(comparison, policy)} for policy in comparison.policies
    }
    last = found[comparison.policies[-1]]
    lines: Mapping[int, RequestLine] = {line.index: line for run in reversed(comparison.runs) for line in run.requests}
    rows = []
    for index in sorted(lines):
        line = lines[index]
        times = tuple(change.after_s if (change := of.get(index)) else None for of in found.values())
        gain = last[index].speed_up if index in last and len(found) > 1 else None
        rows.append(
            RequestRow(index, line.group, line.num_prompt_tokens, line.num_output_tokens, line.sent_s, times, gain)
        )
    return rows


def request_table(comparison: Comparison) -> Requests:
    """The requests, of very many an even choice."""
    rows = request_rows(comparison)
    kept = [rows[int(i)] for i, _ in thinned([(float(i), 0.0) for i in range(len(rows))], MAX_ROWS)]
    note = "" if len(kept) == len(rows) else f"{len(kept)} of {len(rows):,} requests, evenly chosen."
    return Requests(tuple(kept), note)
