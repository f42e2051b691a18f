"""What it costs to remember and to record: CPU time a step of the history and of the recorder, at 32 rows, and bytes.

    python -m benchmarks.recorder               # microbenchmark: seconds
    python -m benchmarks.recorder --native      # and blocks of 200 steps on the real kernels, with and without: minutes

The microbenchmark keeps what a scheduler says of a closed loop of 40 clients on 32 slots (prompts and answers of 20 to
200 tokens), and hands it to a fresh history and a fresh recorder again and again.

With `--native` two loops serve the same requests with the embedded model, one of them remembered and recorded, the
other not; their blocks of 200 steps, the same work, take turns: on off off on. The cost is what the loop's thread
spends outside of the kernels more than without, and all of the writing thread. Beside it stands the ratio of all CPU
time of the blocks that belong together, kernels included, with a 95 % interval (Student's t on its logarithm).

Times are CPU times, so that what else runs on the machine enters little.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduler import result_of
from everystop.core.events import Event, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.recording import Listener, RecordingScheduler
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.machine import default_num_threads
from everystop.observe.history import History
from everystop.observe.metrics import Metrics
from everystop.observe.recorder import Recorder
from everystop.observe.trace.chrome import chrome_chunks
from everystop.observe.trace.perfetto import perfetto_chunks
from everystop.observe.trace.picture import picture_of
from everystop.runner import ModelRunner
from everystop.sim.replay import history_of_record
from everystop.sim.workloads import Dice

NUM_ROWS, NUM_CLIENTS = 32, 40
NUM_STEPS = 2_000
STEP_NS = 20_000_000
STEPS_A_TICK = 12  # the server folds its history every 0.25 s
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 32, NUM_ROWS * 16, 256
REPEATS = 7
BLOCK_STEPS, NUM_PAIRS = 200, 10
STUDENT_T = 2.262  # of 9 degrees of freedom, at 97.5 %


class Calls:
    """A listener that keeps the calls, to be made again."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, arguments))

    def repeat(self, listener: Listener) -> None:
        """Make all calls on another listener."""
        for name, arguments in self.calls:
            getattr(listener, name)(*arguments)


class Clients:
    """A closed loop: whoever has been served asks again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._dice = Dice("recorder", 1)
        self._num = 0

    def ask(self, now_ns: int) -> None:
        """Requests until there are as many as clients."""
        while len(self._scheduler.requests) < NUM_CLIENTS:
            params = SamplingParams(max_tokens=self._dice.between(20, 200), temperature=0.0, ignore_eos=True)
            prompt = self._dice.prompt(self._dice.between(20, 200))
            self._scheduler.add(Request(self._num, prompt, params, arrival_ns=now_ns), now_ns)
            self._num += 1


class Run(NamedTuple):
    """What a scheduler said in a number of steps: its calls, and the events of each step."""

    calls: Calls
    events: list[list[Event]]
    num_rows: float


def make_scheduler(listener: Listener | None) -> Scheduler:
    """A scheduler with 32 slots and room for all of them."""
    kv = KVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=NUM_ROWS, max_num_batched_tokens=MAX_TOKENS, max_model_len=512)
    policy = make_policy("continuous")
    return Scheduler(limits, kv, policy) if listener is None else RecordingScheduler(limits, kv, policy, listener)


def run_steps(num_steps: int) -> Run:
    """A closed loop in virtual time, once it is in full swing."""
    calls = Calls()
    scheduler = make_scheduler(calls)
    clients, events, now_ns = Clients(scheduler), [], 0
    for _ in range(num_steps):
        clients.ask(now_ns)
        plan = scheduler.schedule(now_ns)
        result = result_of(plan)
        result.execute_ns = STEP_NS - 300_000
        now_ns += STEP_NS
        events.append(scheduler.update(plan, result, now_ns))
    steps = [event for turn in events for event in turn if isinstance(event, StepEvent)]
    return Run(calls, events, statistics.mean(len(step.plan.rows) for step in steps))


def remember(run: Run) -> None:
    """What the server does with events for the history."""
    history = History()
    for number, events in enumerate(run.events):
        history.receive(events)
        if number % STEPS_A_TICK == 0:
            history.catch_up()
    history.catch_up()


def count(run: Run) -> None:
    """What the server does with events for the metrics."""
    metrics = Metrics(NUM_BLOCKS)
    for number, events in enumerate(run.events):
        metrics.receive(events)
        if number % STEPS_A_TICK == 0:
            metrics.catch_up()
    metrics.catch_up()


def record(run: Run) -> None:
    """What the server does with calls for `--record`."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "record.gz", "continuous", PolicySettings())
        run.calls.repeat(recorder)
        recorder.close()


def bytes_a_step(run: Run) -> dict[str, float]:
    """Size of the record and of what `everystop trace` makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.gz"
        recorder = Recorder(path, "continuous", PolicySettings())
        run.calls.repeat(recorder)
        recorder.close()
        picture = picture_of(history_of_record(path))
        sizes = {
            "record": path.stat().st_size,
            "trace": sum(map(len, perfetto_chunks(picture))),
            "trace as JSON": sum(map(len, chrome_chunks(picture))),
        }
    return {name: size / len(run.events) for name, size in sizes.items()}


def microseconds_a_step(work: Callable[[Run], None], run: Run) -> float:
    """CPU time of all threads, a step: the median over repeats."""
    times = []
    for _ in range(REPEATS):
        gc.collect()
        start_ns = time.process_time_ns()
        work(run)
        times.append((time.process_time_ns() - start_ns) / len(run.events) / 1e3)
    return statistics.median(times)


class TimedRunner:
    """A runner that knows how much CPU time its caller's thread has spent in it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.inside_ns = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute, and count."""
        start_ns = time.thread_time_ns()
        result = self._runner.execute(plan)
        self.inside_ns += time.thread_time_ns() - start_ns
        return result

    def close(self) -> None:
        """Release the runner."""
        self._runner.close()


class Block(NamedTuple):
    """CPU times of 200 steps: of the loop's thread outside of the kernels, of the writing thread, of everything."""

    loop_ns: int
    writer_ns: int
    all_ns: int


class Serving:
    """One loop of requests, on a runner of its own; with a recorder it is also remembered and recorded."""

    def __init__(self, runner: ModelRunner, recorder: Recorder | None) -> None:
        self._recorder, self._history = recorder, History() if recorder is not None else None
        self._scheduler = make_scheduler(recorder)
        self._runner = TimedRunner(runner)
        self._loop = StepLoop(self._scheduler, self._runner, time.monotonic_ns)
        self._clients = Clients(self._scheduler)

    def block(self, num_steps: int = BLOCK_STEPS) -> Block:
        """Serve for a number of steps."""
        inside_ns, writer_ns = self._runner.inside_ns, self._writer_ns()
        start_ns, all_ns = time.thread_time_ns(), time.process_time_ns()
        for number in range(num_steps):
            self._clients.ask(time.monotonic_ns())
            events = self._loop.turn().events
            if self._history is not None:
                self._history.receive(events)
                if number % STEPS_A_TICK == 0:
                    self._history.catch_up()
        loop_ns = time.thread_time_ns() - start_ns - (self._runner.inside_ns - inside_ns)
        if self._recorder is not None:
            time.sleep(0.05)  # until the last batch is written
        return Block(loop_ns, self._writer_ns() - writer_ns, time.process_time_ns() - all_ns)

    def _writer_ns(self) -> int:
        if self._recorder is None:
            return 0
        assert self._recorder.thread_id is not None
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._recorder.thread_id))


def make_runner() -> ModelRunner:
    """The embedded model on this machine's kernels."""
    from everystop.model.checkpoint import inspect_model
    from everystop.model.home import Home
    from everystop.model.pull import resolve_model
    from everystop.model.weights import load_model
    from everystop.runner.native import NativeRunner

    home, num_threads = Home.from_environment(), default_num_threads()
    loaded = load_model(inspect_model(resolve_model("smollm2", home)), dtype="int8", num_threads=num_threads, home=home)
    return NativeRunner(
        loaded,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=NUM_ROWS,
        num_threads=num_threads,
    )


def measure_blocks() -> tuple[list[Block], list[Block]]:
    """Blocks with and without, in pairs of the same work."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "record.gz", "continuous", PolicySettings())
        servings = Serving(make_runner(), recorder), Serving(make_runner(), None)
        blocks: tuple[list[Block], list[Block]] = ([], [])
        for serving in servings:
            serving.block()  # warm-up
        for pair in range(NUM_PAIRS):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                blocks[which].append(servings[which].block())
        recorder.close()
    return blocks


def print_blocks(on: list[Block], off: list[Block]) -> None:
    """What being recorded costs on the real kernels."""
    loop_us = [(a.loop_ns - b.loop_ns) / BLOCK_STEPS / 1e3 for a, b in zip(on, off, strict=True)]
    writer_us = [block.writer_ns / BLOCK_STEPS / 1e3 for block in on]
    both_us = statistics.median(map(sum, zip(loop_us, writer_us, strict=True)))
    step_ms = statistics.median(block.all_ns for block in off) / BLOCK_STEPS / 1e6
    print(f"{NUM_PAIRS} pairs of blocks of {BLOCK_STEPS} steps; without, a step takes {step_ms:.1f} ms of all CPU time")
    print(
        f"  remembered and recorded: {both_us:.0f} µs a step ({statistics.median(loop_us):.0f} in the loop, "
        f"{statistics.median(writer_us):.0f} writing), {both_us / 1e3 / step_ms:.2%} of that"
    )
    logs = [math.log(a.all_ns / b.all_ns) for a, b in zip(on, off, strict=True)]
    half = STUDENT_T * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(statistics.mean(logs) + side * half) - 1 for side in (-1, 0, 1))
    print(f"  all CPU time, kernels included: {middle:+.2%} (95 %: {low:+.2%} to {high:+.2%})")


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="also on the real kernels")
    arguments = parser.parse_args()
    run = run_steps(NUM_STEPS)
    num_events = sum(map(len, run.events)) / len(run.events)
    print(f"{run.num_rows:.1f} rows and {num_events:.2f} events a step, of which 1 is the step's own")
    for name, work in (("history", remember), ("recorder", record), ("metrics", count)):
        print(f"  {name:9} {microseconds_a_step(work, run):6.1f} µs of CPU time a step")
    print("  bytes a step: " + ", ".join(f"{name} {size:.0f}" for name, size in bytes_a_step(run).items()))
    if arguments.native:
        print_blocks(*measure_blocks())


if __name__ == "__main__":
    main()
