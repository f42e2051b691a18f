"""What `simulate` and `calibrate` find, in words."""

from __future__ import annotations

from typing import Any

from everystop.core.durations import NS_PER_MS
from everystop.sim.cost import CostModel
from everystop.sim.fit import Fit
from everystop.sim.replay_report import DURATIONS

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
NUM_TENANTS_SHOWN = 20


def describe_run(results: dict[str, Any]) -> str:
    """The results of `everystop.sim.run.run_trace` as text."""
    trace, setup = results["trace"], results["setup"]
    lines = [
        f"{trace['file']}: {results['num_requests']:,} requests, lengths × {trace['scale_lengths']:g}, "
        f"time × {trace['dilate_time']:g}",
        f"policy {setup['policy']}, {several(setup['num_replicas'], 'replica')}, router {setup['router']}; "
        f"step times: {setup['cost']['source'] or 'no source given'}",
        "",
        *_table(results),
        "",
        f"{results['duration_s']:,.1f} s of virtual time, {results['num_steps']:,} steps; "
        f"{results['requests_per_s']:,.2f} requests/s, {results['output_tokens_per_s']:,.1f} output tokens/s",
        f"{results['num_refused']:,} refused, {results['num_preemptions']:,} preemptions, "
        f"{results['recomputed_share']:.2%} of computed tokens recomputed, "
        f"{results['prefix_hit_rate']:.1%} of prompt tokens from the prefix cache",
        *_promise_lines(results),
        *_ignored_lines(results),
    ]
    for number, replica in enumerate(results["replicas"]):
        lines.append(f"replica {number}: {replica['num_requests']:,} requests, busy {replica['busy_share']:.1%}")
    return "\n".join(lines + _tenant_lines(results["tenants"]))


def _promise_lines(results: dict[str, Any]) -> list[str]:
    """Goodput, where something was demanded, and the fairness index, where tenants had to wait."""
    lines, goodput, fairness = [], results["goodput"], results["fairness_index"]
    if goodput is not None:
        slo = results["setup"]["slo"]
        demands = [
            f"{what} {slo[name] / NS_PER_MS:g} ms"
            for what, name in (("TTFT", "ttft_ns"), ("each ITL", "itl_ns"))
            if slo[name] is not None
        ]
        lines.append(
            f"goodput ({' and '.join(demands)} at most): {goodput['share']:.1%} of requests, "
            f"{goodput['requests_per_s']:,.2f} requests/s"
        )
    if fairness is not None:
        lines.append(
            f"Jain's index over tenants that waited, in {several(fairness['num_windows'], 'window')} of "
            f"{fairness['window_s']:g} s: mean {fairness['mean']:.3f}, least {fairness['least']:.3f}"
        )
    return lines


def _ignored_lines(results: dict[str, Any]) -> list[str]:
    num, policy = results["num_targets_without_effect"], results["setup"]["policy"]
    if not num:
        return []
    return [f"{several(num, 'request')} came with targets, which the policy {policy} does not know: no effect"]


def several(num: int, what: str) -> str:
    """So many of it, in words."""
    return f"{num} {what}{'' if num == 1 else 's'}"


def _table(results: dict[str, Any]) -> list[str]:
    head = f"{'ms':6}" + "".join(f"{column:>12}" for column in COLUMNS)
    rows = [
        f"{name.upper():6}" + "".join(f"{results[f'{name}_ms'][column]:12,.1f}" for column in COLUMNS)
        for name in ("ttft", "itl", "tpot", "e2e")
        if f"{name}_ms" in results
    ]
    return [head, *rows]


def _tenant_lines(tenants: dict[str, Any]) -> list[str]:
    """The tenants that sent most, if there is more than one."""
    if len(tenants) < 2:
        return []
    largest = sorted(tenants.items(), key=lambda item: (-item[1]["num_requests"], item[0]))
    lines = ["", f"{'tenant':32}{'requests':>10}{'TTFT p50 ms':>14}{'p95':>12}{'ITL p95 ms':>14}{'output tokens':>15}"]
    for name, figures in largest[:NUM_TENANTS_SHOWN]:
        ttft = figures["ttft_ms"]
        lines.append(
            f"{name[:31]:32}{figures['num_requests']:10,}{ttft['p50']:14,.1f}{ttft['p95']:12,.1f}"
            f"{figures['itl_ms']['p95']:14,.1f}{figures['num_output_tokens']:15,}"
        )
    if len(largest) > NUM_TENANTS_SHOWN:
        lines.append(f"and {len(largest) - NUM_TENANTS_SHOWN} more; --json has all")
    return lines


def describe_errors(fitted: Fit) -> str:
    """How far a fitted model is off on the steps that it has not seen."""
    return (
        f"{fitted.num_steps:,} steps, {fitted.held_up_share:.1%} of them taken for held up; "
        f"of the {fitted.num_held_out:,} after them each is off by "
        f"{fitted.median_error:.1%} median, {fitted.p90_error:.1%} p90, all together by {fitted.total_error:+.1%}"
    )


def describe_prediction(errors: dict[str, float]) -> str:
    """The errors of simulated durations in words."""
    parts = []
    for name in DURATIONS:
        found = [f"{p} {errors[f'{name}_{p}']:+.1%}" for p in ("p50", "p90") if f"{name}_{p}" in errors]
        parts.append(f"{name.upper()} {', '.join(found) or 'none recorded'}")
    return "; ".join(parts)


def describe_model(model: CostModel) -> str:
    """The numbers of a cost model, and where they come from."""
    lines = [f"{name:20}{value:16,.1f}" for name, value in model.numbers().items()]
    return "\n".join([*lines, model.source])
