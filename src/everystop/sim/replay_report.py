"""What a replay finds, as plain data and in words: the recorded run beside what another policy makes of it.

Another policy is compared with the recorded one in the same simulation, so that the error of the step times is in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.sim.replay import ReplayReport, Timeline
from everystop.sim.tally import Histogram

DURATIONS = ("ttft", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
SAME_SHARE = 0.05
NUM_TENANTS_SHOWN = 10
LABEL, COLUMN = 12, 16


def replay_figures(report: ReplayReport) -> dict[str, Any]:
    """A replay as plain data; `recorded`, `replayed` and `baseline` have the same fields.

    `requests` counts those whose first token comes sooner, later, or within 5 % of the same time under the other
    policy.
    """
    figures: dict[str, Any] = {
        "policy": report.policy,
        "num_plans": report.num_plans,
        "num_requests": report.num_requests,
        "first_difference": report.first_difference,
        "is_truncated": report.is_truncated,
        "may_go_on": report.may_go_on,
        "recorded": _timeline_figures(report.recorded),
        "replayed": _timeline_figures(report.replayed),
        "baseline": None if report.baseline is None else _timeline_figures(report.baseline),
    }
    if report.baseline is not None:
        figures["recorded_policy"] = report.recorded_policy
        figures["requests"] = _compared(report.baseline, report.replayed)
    return figures


def _timeline_figures(timeline: Timeline) -> dict[str, Any]:
    seconds = max(0, timeline.span_ns()) / NS_PER_S
    num_tokens = timeline.num_tokens.total()
    figures: dict[str, Any] = {
        "num_steps": timeline.num_steps,
        "num_output_tokens": num_tokens,
        "num_preemptions": timeline.num_preemptions,
        "duration_s": round(seconds, 6),
        "output_tokens_per_s": round(num_tokens / seconds, 3) if seconds else 0.0,
    }
    for name, durations in zip(DURATIONS, (timeline.ttft_ns(), timeline.itl_ns, timeline.e2e_ns()), strict=True):
        figures[f"{name}_ms"] = _statistics(durations)
    tenants = sorted(set(timeline.tenant.values()), key=int)
    if len(tenants) > 1:
        ttft = timeline.ttft_by_request()
        figures["tenant_ttft_ms"] = {
            tenant: _statistics([ns for i, ns in ttft.items() if timeline.tenant[i] == tenant]) for tenant in tenants
        }
    return figures


def _statistics(durations: Sequence[int]) -> dict[str, float]:
    histogram = Histogram()
    for ns in durations:
        histogram.add(ns)
    return histogram.in_ms()


def _compared(before: Timeline, after: Timeline) -> dict[str, Any]:
    """Whose first token comes sooner or later, and the two that it makes most difference to."""
    old, new = before.ttft_by_request(), after.ttft_by_request()
    changes = {i: new[i] - ns for i, ns in old.items() if i in new}
    moved = {i: change for i, change in changes.items() if abs(change) > SAME_SHARE * old[i]}
    figures: dict[str, Any] = {
        "num_sooner": sum(change < 0 for change in moved.values()),
        "num_later": sum(change > 0 for change in moved.values()),
        "num_same": len(changes) - len(moved),
    }
    for name, pick, sign in (("most_gained", min, -1), ("most_lost", max, 1)):
        chosen = pick(moved, key=lambda i: (moved[i], i), default=None)
        if chosen is not None and moved[chosen] * sign > 0:
            times = {"before_ms": old[chosen], "after_ms": new[chosen]}
            figures[name] = {"request": chosen, **{key: round(ns / NS_PER_MS, 3) for key, ns in times.items()}}
    return figures


def describe_replay(figures: Mapping[str, Any]) -> str:
    """A replay in words."""
    step = figures["first_difference"]
    verdict = "all as recorded" if step is None else f"step {step} is the first that differs from the record"
    lines = [f"{figures['num_requests']:,} requests, {figures['num_plans']:,} plans: {verdict}"]
    if figures["may_go_on"]:
        lines.append("the record has no end: it may still be being written, or was cut off; it was read up to there")
    elif figures["is_truncated"]:
        lines.append("the record is cut off or damaged; it was read up to there")
    if step is not None:
        lines.append("what comes after it was not read, and no other policy is simulated")
    columns = {"recorded": figures["recorded"]}
    if figures["baseline"] is not None:
        name = "changed" if figures["policy"] == figures["recorded_policy"] else figures["policy"]
        columns |= {f"{figures['recorded_policy']}*": figures["baseline"], f"{name}*": figures["replayed"]}
    lines += ["", *_table(columns)]
    if figures["baseline"] is not None:
        lines += [*_tenant_lines(figures), "", *_comparison(figures)]
    return "\n".join(lines)


def _table(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Durations and counts side by side; of three columns the last two are compared."""
    runs = list(columns.values())
    is_compared = len(runs) == 3
    lines = [_row("ms", list(columns), "change" if is_compared else "")]
    for name in DURATIONS:
        for statistic in STATISTICS:
            values = [run[f"{name}_ms"][statistic] for run in runs]
            change = _change(values[1], values[2]) if is_compared else ""
            lines.append(_row(f"{name.upper()} {statistic}", [f"{value:,.1f}" for value in values], change))
    for label, name, form in (
        ("steps", "num_steps", ",d"),
        ("tokens", "num_output_tokens", ",d"),
        ("preemptions", "num_preemptions", ",d"),
        ("seconds", "duration_s", ",.1f"),
        ("tokens/s", "output_tokens_per_s", ",.1f"),
    ):
        values = [run[name] for run in runs]
        change = _change(values[1], values[2]) if is_compared else ""
        lines.append(_row(label, [format(value, form) for value in values], change))
    return lines


def _row(label: str, values: Sequence[str], change: str) -> str:
    return (f"{label:{LABEL}}" + "".join(f"{value:>{COLUMN}}" for value in values) + f"{change:>10}").rstrip()


def _change(before: float, after: float) -> str:
    """How much more or less, as a share; nothing where there is nothing to compare with."""
    if not before:
        return ""
    share = after / before - 1
    return f"× {after / before:.1f}" if share >= 1 else f"{share:+.1%}"


def _tenant_lines(figures: Mapping[str, Any]) -> list[str]:
    """TTFT p95 of the first tenants, if there are several."""
    tenants = figures["baseline"].get("tenant_ttft_ms", {})
    lines = [""] if tenants else []
    for tenant in list(tenants)[:NUM_TENANTS_SHOWN]:
        runs = [figures[name]["tenant_ttft_ms"][tenant]["p95"] for name in ("recorded", "baseline", "replayed")]
        label = f"tenant {tenant}"
        lines.append(_row(label, [f"{value:,.1f}" for value in runs], _change(runs[1], runs[2])))
    if tenants:
        lines[1:1] = [_row("TTFT p95", [], "")]
    if len(tenants) > NUM_TENANTS_SHOWN:
        lines.append(f"and {len(tenants) - NUM_TENANTS_SHOWN} more; --json has all")
    return lines


def _comparison(figures: Mapping[str, Any]) -> list[str]:
    requests, old, new = figures["requests"], figures["recorded_policy"], figures["policy"]
    errors = [
        f"{name.upper()} p50 {simulated / recorded - 1:+.1%}"
        for name in DURATIONS
        for recorded, simulated in [(figures[run][f"{name}_ms"]["p50"] for run in ("recorded", "baseline"))]
        if recorded
    ]
    num = requests["num_sooner"] + requests["num_later"] + requests["num_same"]
    lines = [
        f"under {new} the first token comes sooner for {requests['num_sooner']:,}, later for "
        f"{requests['num_later']:,}, within {SAME_SHARE:.0%} of the same time for {requests['num_same']:,} of "
        f"{num:,} requests",
    ]
    for name, word in (("most_gained", "gains"), ("most_lost", "loses")):
        if name in requests:
            one = requests[name]
            times = f"{one['before_ms']:,.1f} ms before, {one['after_ms']:,.1f} ms after"
            lines.append(f"request {one['request']} {word} most: {times}")
    return [
        *lines,
        f"* simulated, with step times fitted to the record; against the record {old} is off by {', '.join(errors)}",
    ]
