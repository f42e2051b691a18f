"""What `simulate`, `calibrate` and `replay` find, as plain data and in words."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from everystop.core.policy import Targets
from everystop.core.scheduler import Limits
from everystop.sim.cost import CostModel, StepCost
from everystop.sim.fit import Fit, fit
from everystop.sim.replay import ReplayReport, Timeline, predict, timed_steps
from everystop.sim.simulator import Setup, Simulation
from everystop.sim.tally import NS_PER_MS, NS_PER_S, Histogram
from everystop.sim.traces import TraceOptions, read_trace

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
DURATIONS = ("ttft", "itl", "e2e")
NUM_TENANTS_SHOWN = 20
LIMIT_NAMES = ("max_num_seqs", "max_num_batched_tokens", "max_num_prefill_tokens", "admission")


def run_trace(
    path: Path,
    options: TraceOptions,
    *,
    scheduler: dict[str, Any],
    cost: StepCost,
    num_replicas: int,
    router: str,
    check: bool = False,
) -> dict[str, Any]:
    """Simulate a trace; returns what was simulated and the results.

    `scheduler` holds the server's settings of those names and `num_blocks`. Raises TraceError and ConfigError.
    """
    num_slots = scheduler["num_blocks"] * scheduler["block_size"]
    limits = {name: scheduler[name] for name in LIMIT_NAMES}
    setup = Setup(
        limits=Limits(**limits, max_model_len=scheduler["max_model_len"] or num_slots),
        num_blocks=scheduler["num_blocks"],
        block_size=scheduler["block_size"],
        enable_prefix_caching=scheduler["enable_prefix_caching"],
        policy=scheduler["policy"],
        batch_wait_ns=scheduler["batch_wait_ms"] * NS_PER_MS,
        ageing_ns=round(scheduler["ageing"] * NS_PER_S),
        targets=Targets.from_ms(scheduler["ttft_target_ms"], scheduler["itl_target_ms"]),
        cost=cost,
        num_replicas=num_replicas,
        router=router,
        check=check,
    )
    results = Simulation(setup).run(read_trace(path, options))
    return {"trace": {"file": path.name, **asdict(options)}, "setup": asdict(setup), **results}


def describe_run(results: dict[str, Any]) -> str:
    """The results of `run_trace` as text."""
    trace, setup = results["trace"], results["setup"]
    lines = [
        f"{trace['file']}: {results['num_requests']:,} requests, lengths × {trace['scale_lengths']:g}, "
        f"time × {trace['dilate_time']:g}",
        f"policy {setup['policy']}, {_several(setup['num_replicas'], 'replica')}, router {setup['router']}; "
        f"step times: {setup['cost']['source'] or 'no source given'}",
        "",
        *_table(results),
        "",
        f"{results['duration_s']:,.1f} s of virtual time, {results['num_steps']:,} steps; "
        f"{results['requests_per_s']:,.2f} requests/s, {results['output_tokens_per_s']:,.1f} output tokens/s",
        f"{results['num_refused']:,} refused, {results['num_preemptions']:,} preemptions, "
        f"{results['recomputed_share']:.2%} of computed tokens recomputed, "
        f"{results['prefix_hit_rate']:.1%} of prompt tokens from the prefix cache",
    ]
    for number, replica in enumerate(results["replicas"]):
        lines.append(f"replica {number}: {replica['num_requests']:,} requests, busy {replica['busy_share']:.1%}")
    return "\n".join(lines + _tenant_lines(results["tenants"]))


def _several(num: int, what: str) -> str:
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
    lines = ["", f"{'tenant':32}{'requests':>10}{'TTFT p50 ms':>14}{'p95':>12}{'TPOT p95 ms':>14}{'output tokens':>15}"]
    for name, figures in largest[:NUM_TENANTS_SHOWN]:
        ttft = figures["ttft_ms"]
        lines.append(
            f"{name[:31]:32}{figures['num_requests']:10,}{ttft['p50']:14,.1f}{ttft['p95']:12,.1f}"
            f"{figures['tpot_ms']['p95']:14,.1f}{figures['num_output_tokens']:15,}"
        )
    if len(largest) > NUM_TENANTS_SHOWN:
        lines.append(f"and {len(largest) - NUM_TENANTS_SHOWN} more; --json has all")
    return lines


def calibrate(path: Path, held_out: Path | None) -> CostModel:
    """Step times fitted to a record; the model's `source` says how far it is off, so every prediction will.

    With a second record, that is also the error of its durations as simulated from its arrivals. Raises RecordError and
    CostError.
    """
    fitted = fit(*timed_steps(path))
    words = describe_errors(fitted)
    errors = {"step_median": fitted.median_error, "step_p90": fitted.p90_error, "step_total": fitted.total_error}
    if held_out is not None:
        off = prediction_errors(predict(held_out, fitted.model))
        words += f"; {held_out.name} as simulated: {describe_prediction(off)}"
        errors |= off
    errors = {name: round(error, 6) for name, error in errors.items()}
    return replace(fitted.model, source=f"fitted to {path.name} ({words})", errors=errors)


def describe_errors(fitted: Fit) -> str:
    """How far a fitted model is off on the steps that it has not seen."""
    return (
        f"{fitted.num_steps:,} steps, {fitted.held_up_share:.1%} of them taken for held up; "
        f"of the {fitted.num_held_out:,} after them each is off by "
        f"{fitted.median_error:.1%} median, {fitted.p90_error:.1%} p90, all together by {fitted.total_error:+.1%}"
    )


def prediction_errors(report: ReplayReport) -> dict[str, float]:
    """How far simulated durations are off the recorded ones, as shares: "ttft_p50" to "e2e_p90"."""
    figures = replay_figures(report)
    errors: dict[str, float] = {}
    for name in DURATIONS:
        recorded, simulated = figures["recorded"][f"{name}_ms"], figures["replayed"][f"{name}_ms"]
        errors |= {f"{name}_{p}": simulated[p] / recorded[p] - 1 for p in ("p50", "p90") if recorded[p]}
    return errors


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


def replay_figures(report: ReplayReport) -> dict[str, Any]:
    """A replay as plain data; `recorded` and `replayed` have the same fields."""
    return {
        "policy": report.policy,
        "num_plans": report.num_plans,
        "num_requests": report.num_requests,
        "first_difference": report.first_difference,
        "is_truncated": report.is_truncated,
        "recorded": _timeline_figures(report.recorded),
        "replayed": _timeline_figures(report.replayed),
    }


def _timeline_figures(timeline: Timeline) -> dict[str, Any]:
    figures: dict[str, Any] = {"num_steps": timeline.num_steps, "num_output_tokens": timeline.num_tokens.total()}
    for name, durations in (
        ("ttft_ms", timeline.ttft_ns()),
        ("itl_ms", timeline.itl_ns),
        ("e2e_ms", timeline.e2e_ns()),
    ):
        histogram = Histogram()
        for ns in durations:
            histogram.add(ns)
        figures[name] = histogram.in_ms()
    return figures


def describe_replay(figures: dict[str, Any]) -> str:
    """A replay in words."""
    step = figures["first_difference"]
    verdict = "all as recorded" if step is None else f"step {step} is the first that differs from the record"
    lines = [f"{figures['num_requests']:,} requests, {figures['num_plans']:,} plans: {verdict}"]
    if figures["is_truncated"]:
        lines.append("the record is cut off; it was read up to there")
    for title in ("recorded", "replayed"):
        run = figures[title]
        name = f"simulated under {figures['policy']}" if title == "replayed" else "recorded"
        if title == "replayed" and run == figures["recorded"]:
            continue
        counts = f"{run['num_steps']:,} steps, {run['num_output_tokens']:,} output tokens"
        lines += ["", f"{name}: {counts}", *_table(run)]
    return "\n".join(lines)
