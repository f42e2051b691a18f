"""What an explanation costs: CPU time and bytes, for a request of 1,000 tokens beside 31 others.

    python -m benchmarks.explain
    python -m benchmarks.explain --what-if 1 5 20    # instead: estimates from records of so many minutes

The request runs in a closed loop of 40 clients on 32 slots (prompts of 20 to 400 tokens, answers of 20 to 200), in
virtual time; steps last as long as a fitted model of this kind says. Times are the least CPU time of several.

With `--what-if` such loops of 32 clients are recorded, and `everystop explain --what-if` asked once for the last
request that ended, which is the dearest: its CPU time and the most memory that it had.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.scheduler import result_of
from everystop.core.durations import NS_PER_S
from everystop.core.events import FinishEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import PolicySettings, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepFeatures, StepTimeModel
from everystop.observe.excerpt import excerpt_of
from everystop.observe.explain import Explanation, explain, tell
from everystop.observe.history import History
from everystop.observe.life import life_of
from everystop.observe.recorder import Recorder
from everystop.observe.wording import number_name
from everystop.sim.workloads import Dice

NUM_TOKENS, NUM_SLOTS, NUM_CLIENTS = 1_000, 32, 40
HOST_NS = 300_000
STEP_TIMES = StepTimeModel(step_ns=2_500_000, token_ns=300_000, decode_context_ns=60, prefill_pair_ns=60)
REPEATS = 9


def lived() -> tuple[History, int]:
    """The history of a run that ends with the long request, and the time then."""
    kv = KVCache(num_blocks=NUM_SLOTS * 48, block_size=32, enable_prefix_caching=True)
    scheduler = Scheduler(Limits(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=256), kv, make_policy("continuous"))
    history, dice, now_ns, num = History(), Dice("explain", 1), 0, 0
    while num == 0 or 0 in scheduler.requests:
        while len(scheduler.requests) < NUM_CLIENTS:
            max_tokens = NUM_TOKENS if num == 0 else dice.between(20, 200)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            request = Request(num, dice.prompt(dice.between(20, 400)), params, arrival_ns=now_ns)
            scheduler.add(request, now_ns)
            num += 1
        plan = scheduler.schedule(now_ns)
        result = result_of(plan)
        result.execute_ns = round(STEP_TIMES.execute_ns(StepFeatures.of(plan)))
        now_ns += HOST_NS + result.execute_ns
        history.receive(scheduler.update(plan, result, now_ns))
        history.catch_up()
    return history, now_ns


def record(path: Path, minutes: float) -> int:
    """Record a loop of 32 clients for so long; returns the number of the last request that has ended."""
    recorder = Recorder(path, "continuous", PolicySettings())
    kv = KVCache(num_blocks=NUM_SLOTS * 48, block_size=32, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=256)
    scheduler = RecordingScheduler(limits, kv, make_policy("continuous"), recorder)
    dice, now_ns, num, last = Dice("explain", 1), 0, 0, 0
    while now_ns < minutes * 60 * NS_PER_S:
        while len(scheduler.requests) < NUM_SLOTS:
            params = SamplingParams(max_tokens=dice.between(20, 200), temperature=0.0, ignore_eos=True)
            scheduler.add(Request(num, dice.prompt(dice.between(20, 400)), params, arrival_ns=now_ns), now_ns)
            num += 1
        plan = scheduler.schedule(now_ns)
        result = result_of(plan)
        result.execute_ns = round(STEP_TIMES.execute_ns(StepFeatures.of(plan)))
        now_ns += HOST_NS + result.execute_ns
        ended = [event for event in scheduler.update(plan, result, now_ns) if isinstance(event, FinishEvent)]
        last = max([last, *(event.request_id for event in ended)])
    recorder.close()
    return last


def print_estimates(minutes: float) -> None:
    """What estimates from a record of so many minutes cost, and its size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.gz"
        last = record(path, minutes)
        command = [sys.executable, "-m", "everystop", "explain", str(last), "--record", str(path), "--what-if"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{minutes:g} min, {last:,} requests, {path.stat().st_size / 1e6:.1f} MB: {seconds:.1f} s of CPU time, "
            f"{after.ru_maxrss / 1024:,.0f} MiB at most"
        )


def milliseconds(work: Callable[[], object]) -> float:
    """The least CPU time of several."""
    best = float("inf")
    for _ in range(REPEATS):
        began_s = time.process_time()
        work()
        best = min(best, time.process_time() - began_s)
    return 1e3 * best


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what-if", type=float, nargs="+", metavar="MINUTES", help="estimates from such records")
    arguments = parser.parse_args()
    if arguments.what_if is not None:
        for minutes in sorted(arguments.what_if):
            print_estimates(minutes)
        return
    history, now_ns = lived()

    def explained() -> Explanation:
        return explain(history, [0], now_ns=now_ns, name_of=number_name)

    explanation = explained()
    text = json.dumps(explanation.as_data())
    excerpt_ms = milliseconds(lambda: excerpt_of(history, [history.trails[0]]))
    print(explanation.sentence)
    told_ms = milliseconds(lambda: tell(history, [0], now_ns=now_ns, name_of=number_name))
    print(f"its causes alone: {milliseconds(lambda: life_of(history, history.trails[0], now_ns)):.1f} ms of CPU time")
    print(f"this sentence: {told_ms:.1f} ms")
    print(f"the explanation: {milliseconds(explained):.1f} ms")
    print(f"and as JSON: {milliseconds(lambda: json.dumps(explained().as_data())):.1f} ms, {len(text) / 1e3:,.0f} kB")
    print(f"the excerpt, which is all that the event loop does: {1e3 * excerpt_ms:.0f} µs")
    print(f"{len(explanation.segments):,} segments, {len(explanation.steps):,} of {explanation.num_steps:,} steps")


if __name__ == "__main__":
    main()
