"""What the scheduler costs: time of schedule and update a step, allocations, and the effect of a long waiting line.

    PYTHONPATH=src python benchmarks/scheduler.py

Targets on one core: schedule and update together under 0.35 ms at 64 running decoders and under 1.3 ms at 256; a decode
row that changes nothing leaves no allocation behind; 10,000 waiting requests add nothing to a step.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

from everystop.core.kv_cache import KVCache
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Limits, Scheduler
from everystop.observe.recorder import Recorder

NUM_STEPS = 2_000
NUM_PROMPT_TOKENS = 40


def make_scheduler(num_running: int, num_waiting: int, recorder: Recorder | None = None) -> Scheduler:
    """A scheduler with `num_running` requests past their prompts and `num_waiting` behind them."""
    max_tokens = 4 * NUM_STEPS
    kv = KVCache(
        num_blocks=num_running * (max_tokens + NUM_PROMPT_TOKENS) // 32 + 64, block_size=32, enable_prefix_caching=True
    )
    limits = Limits(
        max_num_seqs=num_running, max_num_batched_tokens=max(256, num_running), max_model_len=2 * max_tokens
    )
    policy = make_policy("continuous")
    scheduler = Scheduler(limits, kv, policy) if recorder is None else RecordingScheduler(limits, kv, policy, recorder)
    params = SamplingParams(max_tokens=max_tokens)
    for i in range(num_running + num_waiting):
        scheduler.add(Request(i, [i, *range(NUM_PROMPT_TOKENS - 1)], params), 0)
    while len(scheduler.running) < num_running or any(r.is_prefilling for r in scheduler.running.values()):
        step(scheduler)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    """Filler tokens for every row that samples."""
    return StepResult([(0,) if row.logits_from < row.num_tokens else () for row in plan.rows])


def step(scheduler: Scheduler) -> int:
    """One step; returns the nanoseconds spent in schedule and update."""
    start = time.perf_counter_ns()
    plan = scheduler.schedule(start)
    scheduled = time.perf_counter_ns()
    result = result_of(plan)
    resumed = time.perf_counter_ns()
    scheduler.update(plan, result, resumed)
    return time.perf_counter_ns() - resumed + scheduled - start


def milliseconds_a_step(scheduler: Scheduler, num_steps: int = NUM_STEPS) -> tuple[float, float]:
    """Median and 99th percentile over many steps, with the collector off, so that its pauses are not counted."""
    gc.collect()
    gc.disable()
    times = sorted(step(scheduler) / 1e6 for _ in range(num_steps))
    gc.enable()
    return statistics.median(times), times[len(times) * 99 // 100]


def allocations_a_row(scheduler: Scheduler) -> float:
    """Blocks of memory that a step leaves behind, a row, in the median; every 32nd step takes and publishes blocks."""
    gc.collect()
    gc.disable()
    left = []
    for _ in range(60):
        before = sys.getallocatedblocks()
        step(scheduler)
        left.append((sys.getallocatedblocks() - before) / len(scheduler.running))
    gc.enable()
    return statistics.median(left)


def main() -> None:
    """Print the table."""
    for num_running, target in ((1, None), (64, 0.35), (256, 1.3)):
        median, p99 = milliseconds_a_step(make_scheduler(num_running, 0))
        goal = f"   target {target} ms" if target else ""
        a_row = f"{median / num_running * 1e3:.1f} µs a row"
        print(f"{num_running:4} decoders: {median:.3f} ms a step (p99 {p99:.3f}), {a_row}{goal}")
    for num_waiting in (0, 10_000):
        median, _ = milliseconds_a_step(make_scheduler(64, num_waiting))
        print(f"  64 decoders, {num_waiting:6,} waiting: {median:.3f} ms a step")
    print(f"left behind by a step of 64 decoders: {allocations_a_row(make_scheduler(64, 0)):.2f} allocations a row")
    print_cost_of_recording()


def print_cost_of_recording() -> None:
    """What the caller's thread pays for a record, and what the writing thread pays beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.gz"
        recorder = Recorder(path, policy="continuous")
        scheduler = make_scheduler(64, 0, recorder)
        start, start_here = time.process_time(), time.thread_time()
        recorded, _ = milliseconds_a_step(scheduler)
        here = time.thread_time() - start_here
        recorder.close()
        beside = (time.process_time() - start - here) / NUM_STEPS * 1e6
        size = path.stat().st_size / NUM_STEPS
        print(f"  64 decoders, recorded: {recorded:.3f} ms a step, {beside:.0f} µs beside it, {size:.0f} bytes on disk")


if __name__ == "__main__":
    main()
