"""What the scheduler costs: time of schedule and update a step, allocations, and the effect of a long waiting line.

    PYTHONPATH=src python benchmarks/scheduler.py

Targets on one core: schedule and update together under 0.35 ms at 64 running decoders and under 1.3 ms at 256; a decode
row that changes nothing costs no allocation, neither while its plan is out nor after; 10,000 waiting requests add
nothing to a step that one does not, whatever the policy.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import POLICIES, PolicySettings, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.observe.recorder import Recorder

NUM_STEPS = 2_000
NUM_PROMPT_TOKENS = 40
BLOCK_SIZE = 32
WARM_UP_STEPS = 320  # until positions are numbers that the interpreter does not keep ready
NUM_TENANTS = 7
NUM_STEPS_A_POLICY = 500
NUMS_WAITING = (0, 1, 10_000)
ALLOCATION_ROWS = (16, 64, 256)


def make_scheduler(
    num_running: int,
    num_waiting: int,
    recorder: Recorder | None = None,
    *,
    policy: str = "continuous",
    max_num_batched_tokens: int = 256,
) -> Scheduler:
    """A scheduler with `num_running` requests past their prompts and `num_waiting` behind them, of seven tenants."""
    max_tokens = 4 * NUM_STEPS
    kv = KVCache(
        num_blocks=num_running * (max_tokens + NUM_PROMPT_TOKENS) // BLOCK_SIZE + 64,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
    )
    limits = Limits(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(max_num_batched_tokens, num_running),
        max_model_len=2 * max_tokens,
    )
    core = make_policy(policy)
    scheduler = Scheduler(limits, kv, core) if recorder is None else RecordingScheduler(limits, kv, core, recorder)
    params = SamplingParams(max_tokens=max_tokens)
    for i in range(num_running + num_waiting):
        scheduler.add(Request(i, [i, *range(NUM_PROMPT_TOKENS - 1)], params, tenant=f"tenant {i % NUM_TENANTS}"), 0)
    while len(scheduler.running) < num_running or any(r.num_remaining > 1 for r in scheduler.running.values()):
        step(scheduler)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    """Filler tokens for every row that samples."""
    columns = zip(plan.rows.logits_from, plan.rows.nums_tokens, strict=True)
    return StepResult([(0,) if logits_from < n else () for logits_from, n in columns])


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


class Blocks(NamedTuple):
    """Blocks of memory that one step takes: while its plan is out, and what is left when all is forgotten."""

    while_out: float
    left: float


def blocks_of_a_step(num_rows: int, policy: str = "continuous") -> Blocks:
    """Medians over the steps between two that take and publish cache blocks, at which all rows arrive together.

    The collector is off, for it would empty the interpreter's own stores of tuples, and what they hold counts as taken.
    """
    scheduler = make_scheduler(num_rows, 0, policy=policy, max_num_batched_tokens=num_rows * NUM_PROMPT_TOKENS)
    rows: list[tuple[int, ...] | str] = [(0,)] * num_rows
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP_STEPS):
        step(scheduler)
    looks = [(blocks_while_out(scheduler, rows), blocks_left(scheduler, rows)) for _ in range(BLOCK_SIZE // 2)]
    gc.enable()
    return Blocks(statistics.median(look[0] for look in looks), statistics.median(look[1] for look in looks))


def blocks_while_out(scheduler: Scheduler, rows: list[tuple[int, ...] | str]) -> int:
    """What the interpreter has more of between `schedule` and `update`; the result is the runner's, and made before."""
    result, count = StepResult(rows), sys.getallocatedblocks
    before = count()
    plan = scheduler.schedule(0)
    taken = count() - before
    scheduler.update(plan, result, 0)
    return taken


def blocks_left(scheduler: Scheduler, rows: list[tuple[int, ...] | str]) -> int:
    """What the interpreter has more of after a whole step, but for the number it had before."""
    result, count = StepResult(rows), sys.getallocatedblocks
    before = count()
    plan = scheduler.schedule(0)
    scheduler.update(plan, result, 0)
    del plan
    return count() - before - 1


def line_through(points: dict[int, float]) -> tuple[float, float]:
    """(slope, intercept) by least squares."""
    mean_x, mean_y = statistics.mean(points), statistics.mean(points.values())
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / sum((x - mean_x) ** 2 for x in points)
    return slope, mean_y - slope * mean_x


def print_allocations() -> None:
    """Blocks a step at each number of rows, and the straight line through them: a row's share is its slope."""
    blocks = {num_rows: blocks_of_a_step(num_rows) for num_rows in ALLOCATION_ROWS}
    for name, title in (("while_out", "while the plan is out"), ("left", "left behind by a step")):
        points = {num_rows: getattr(step, name) for num_rows, step in blocks.items()}
        slope, intercept = line_through(points)
        listed = ", ".join(f"{blocks:g} at {num_rows} rows" for num_rows, blocks in points.items())
        print(f"blocks of memory {title}: {listed}; {slope:.3f} a row and {intercept:.1f} a step")


def main() -> None:
    """Print the table."""
    for num_running, target in ((1, None), (64, 0.35), (256, 1.3)):
        median, p99 = milliseconds_a_step(make_scheduler(num_running, 0))
        goal = f"   target {target} ms" if target else ""
        a_row = f"{median / num_running * 1e3:.1f} µs a row"
        print(f"{num_running:4} decoders: {median:.3f} ms a step (p99 {p99:.3f}), {a_row}{goal}")
    print_cost_of_waiting()
    print_allocations()
    print_cost_of_recording()


def print_cost_of_waiting() -> None:
    """A step of 64 decoders under every policy, with nobody, one and very many waiting."""
    for policy in POLICIES:
        medians = [
            milliseconds_a_step(make_scheduler(64, num_waiting, policy=policy), NUM_STEPS_A_POLICY)[0]
            for num_waiting in NUMS_WAITING
        ]
        listed = ", ".join(f"{median:.3f} with {n:,}" for median, n in zip(medians, NUMS_WAITING, strict=True))
        print(f"  64 decoders under {policy:13}: {listed} waiting, ms a step")


def print_cost_of_recording() -> None:
    """What the caller's thread pays for a record, and what the writing thread pays beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.gz"
        recorder = Recorder(path, "continuous", PolicySettings())
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
