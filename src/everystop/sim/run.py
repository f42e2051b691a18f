"""What `simulate` and `calibrate` do: a trace in virtual time, and step times from a record; both give plain data."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from everystop.sim.cost import CostModel
from everystop.sim.fit import fit
from everystop.sim.replay import ReplayReport, predict, timed_steps
from everystop.sim.replay_report import DURATIONS, replay_figures
from everystop.sim.report import describe_errors, describe_prediction
from everystop.sim.simulator import Setup, Simulation
from everystop.sim.traces import TraceOptions, read_trace


def run_trace(path: Path, options: TraceOptions, setup: Setup) -> dict[str, Any]:
    """Simulate a trace; returns what was simulated and the results. Raises TraceError and ConfigError.

    Where the set-up does not say what requests ask for, that is the trace's longest output; in a pipe, which cannot be
    read twice, as many tokens as fit.
    """
    if setup.max_tokens is None and path.is_file():
        longest = max((request.num_output_tokens for request in read_trace(path, options)), default=None)
        setup = replace(setup, max_tokens=longest)
    simulation = Simulation(setup)
    results = simulation.run(read_trace(path, options))
    return {
        "trace": {"file": path.name, **asdict(options)},
        "setup": setup.as_data(),
        "num_targets_without_effect": simulation.num_targets_without_effect,
        **results,
    }


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


def prediction_errors(report: ReplayReport) -> dict[str, float]:
    """How far simulated durations are off the recorded ones, as shares: "ttft_p50" to "e2e_p90"."""
    figures = replay_figures(report)
    errors: dict[str, float] = {}
    for name in DURATIONS:
        recorded, simulated = figures["recorded"][f"{name}_ms"], figures["replayed"][f"{name}_ms"]
        errors |= {f"{name}_{p}": simulated[p] / recorded[p] - 1 for p in ("p50", "p90") if recorded[p]}
    return errors
