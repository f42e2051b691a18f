"""A comparison and everything that follows from it, as the plain data of report.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from everystop.observe.batch_wait import batch_waits
from everystop.observe.bench_keys import arrival_lags_s, bench_keys
from everystop.observe.comparison import Comparison, Run, to_json
from everystop.observe.distribution import distribution_ms
from everystop.observe.gains import Gain, gains, headline
from everystop.observe.ratios import METHOD
from everystop.observe.slot_use import expected_occupancy, slot_use


def report_data(comparison: Comparison) -> dict[str, Any]:
    """Figures by policy and by run, ratios, equality of outputs, and under "comparison" what `from_json` reads."""
    others = comparison.policies[1:]
    lags = distribution_ms([lag for run in comparison.runs for lag in arrival_lags_s(run.requests)])
    return {
        "workload": comparison.workload,
        "settings": dict(comparison.settings),
        "is_complete": comparison.is_complete,
        "num_repeats": {policy: len(comparison.runs_of(policy)) for policy in comparison.policies},
        "num_repeats_asked": comparison.num_repeats_asked,
        "num_errors": comparison.num_errors,
        "outputs": asdict(comparison.equality()),
        "interval_method": METHOD,
        "headline": {policy: _headline(comparison, policy) for policy in others},
        "ratios": {policy: [_gain(gain) for gain in gains(comparison, policy)] for policy in others},
        "arrival_lag_ms": None if math.isnan(lags["mean"]) else lags,
        "by_policy": {
            policy: _figures(comparison, runs) for policy in comparison.policies if (runs := comparison.runs_of(policy))
        },
        "by_run": [{"repeat": run.repeat, **_figures(comparison, [run])} for run in comparison.runs],
        "comparison": to_json(comparison),
    }


def _headline(comparison: Comparison, policy: str) -> dict[str, Any]:
    said = headline(comparison, policy)
    return {
        "baseline": said.baseline,
        "figures": [gain.measure.name for gain in said.figures],
        "losses": [gain.measure.name for gain in said.losses],
    }


def _gain(gain: Gain) -> dict[str, Any]:
    """A ratio above 1 is better; figures are seconds or a rate."""
    return {
        "measure": gain.measure.name,
        "title": gain.measure.title,
        "unit": "1/s" if gain.measure.is_rate else "s",
        "baseline": [_number(value) for value in gain.baseline],
        "values": [_number(value) for value in gain.values],
        "times_better": None if gain.ratio is None else asdict(gain.ratio),
    }


def _figures(comparison: Comparison, runs: Sequence[Run]) -> dict[str, Any]:
    """The keys of vLLM's benchmark, and where the slots of the last of the runs went."""
    use = slot_use(runs[-1])
    return {
        **bench_keys(runs, comparison.settings),
        "expected_occupancy_static": expected_occupancy(runs[-1]),
        "slots": None if use is None else use.as_data(),
        "batch_wait": None if use is None else batch_waits(runs).as_data(),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
