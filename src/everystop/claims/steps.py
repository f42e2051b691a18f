"""Reads steps of runs: which only decoded, how long they took, and the cost model that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from everystop.core.step_time import StepFeatures, num_pairs
from everystop.observe.comparison import Run
from everystop.observe.history import History, StepRecord
from everystop.sim.fit import Fit, TimedStep, fit

MAX_FIT_STEPS = 4_000
HOLD_OUT_EVERY = 5


def history_of(run: Run) -> History:
    """The history that every run on a server, and every virtual one, has."""
    assert run.history is not None, "claims are measured on runs with a history"
    return run.history


def steps_of(run: Run) -> list[StepRecord]:
    """The steps that computed something."""
    steps = history_of(run).steps
    return [record for record in steps.since(steps.start) if record.num_rows]


def features_of(record: StepRecord) -> StepFeatures:
    """What the step computed, as `StepFeatures.of` says it of a plan."""
    decode_context = prefill_pairs = 0
    for start, num in zip(record.starts, record.nums, strict=True):
        if num == 1:
            decode_context += start + 1
        else:
            prefill_pairs += num_pairs(start, num)
    return StepFeatures(sum(record.nums), decode_context, prefill_pairs, record.num_rows)


def decode_steps(run: Run, num_rows: int) -> list[StepRecord]:
    """The steps of exactly so many rows that all decode."""
    return [record for record in steps_of(run) if record.num_rows == num_rows == sum(record.nums)]


def useful_share(run: Run) -> float:
    """Share of the slot-steps in which a request got a token."""
    steps = steps_of(run)
    return run.num_output_tokens / (len(steps) * run.max_num_seqs)


def execute_s(records: Sequence[StepRecord]) -> float:
    """Median time that a step was executed, in seconds; there must be one."""
    return median(record.execute_ns for record in records) / 1e9


def timed_steps(run: Run) -> Iterator[TimedStep]:
    """Each step with its time and the host's since the step before, None where nobody was on board in between."""
    before: StepRecord | None = None
    for record in steps_of(run):
        host_ns = None
        if before is not None and before.num_running > 0:
            host_ns = max(1, record.now_ns - before.now_ns - record.execute_ns)
        yield TimedStep(features_of(record), record.execute_ns, host_ns)
        before = record


def fit_cost(runs: Iterable[Run]) -> Fit:
    """Step times fitted to runs; every fifth step is held out and says how far the model is off."""
    steps = [step for run in runs for step in timed_steps(run)]
    steps = steps[:: -(-len(steps) // MAX_FIT_STEPS)]
    kept = [step for i, step in enumerate(steps) if i % HOLD_OUT_EVERY]
    return fit(kept + steps[::HOLD_OUT_EVERY])
