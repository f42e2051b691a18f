"""What the live stream costs the server, as CPU time per step while a headless reader has it open.

    python -m benchmarks.dashboard smollm2

Chats from 32 clients keep 32 rows busy. Blocks with and without a reader follow each other as off on on off …; each
pair of neighbours gives one difference, and the mean of these is stated with a 95 % t interval. CPU time is that of the
kernel's scheduler for each thread (/proc/PID/task/TID/schedstat, in ns), so wall time does not enter. Two differences
are stated: of the whole process, which the noise of the arithmetic's threads blurs, and of the thread that serves HTTP,
which makes all messages; the latter's share of the process's CPU time is the cost. What the engine's thread does for
the stream, a look at the blocks twice a second, is in the first alone.

`--micro` needs no server: the CPU time of following a made-up run of 32 rows, part by part, the history apart, which is
kept with and without readers.
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import fmean, stdev
from urllib.parse import urlsplit

import msgspec

from benchmarks.loadgen import Target, run_load
from benchmarks.local_server import LocalServer
from everystop.core.events import Event
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.observe.history import History
from everystop.observe.live import LiveReader
from everystop.observe.live_state import LiveState
from everystop.sim.workloads import Dice, Job, Workload

NUM_CLIENTS = 32
NUM_JOBS, NUM_ROUNDS = 2000, 4
SETTLE_S = 5.0
TARGET_SHARE = 0.01
T_95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
    2.09,
)
"""Student's t for 95 %, two-sided, by degrees of freedom from 1."""


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU time that a server has taken so far, and steps that it has done."""

    http_ns: int
    all_ns: int
    num_steps: float

    @classmethod
    def take(cls, server: LocalServer) -> Sample:
        """Now."""
        tasks = {int(task.name): _cpu_ns(task) for task in Path(f"/proc/{server.pid}/task").iterdir()}
        return cls(tasks[server.pid], sum(tasks.values()), server.counters()["steps"])


@dataclass(frozen=True, slots=True)
class Block:
    """CPU time per step of one block, in µs."""

    has_reader: bool
    http_us: float
    all_us: float
    num_steps: float

    @classmethod
    def between(cls, before: Sample, after: Sample, *, has_reader: bool) -> Block:
        """The time between two samples."""
        num = after.num_steps - before.num_steps
        return cls(
            has_reader, (after.http_ns - before.http_ns) / num / 1e3, (after.all_ns - before.all_ns) / num / 1e3, num
        )


def _cpu_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


class Reader(threading.Thread):
    """Takes the stream and throws it away; counts what came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        parts = urlsplit(url)
        self._connection = HTTPConnection(parts.hostname or "", parts.port or 80)
        self.num_bytes = self.num_messages = 0
        self.last = b""
        self._is_leaving = False

    def run(self) -> None:
        self._connection.request("GET", "/ui/stream")
        answer = self._connection.getresponse()
        while not self._is_leaving:
            line = answer.readline()
            self.num_bytes += len(line)
            if line.startswith(b"data: "):
                self.num_messages += 1
                self.last = line
        self._connection.close()

    def leave(self) -> None:
        """Close after the next message."""
        self._is_leaving = True
        self.join(10)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % t interval."""
    half = T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))
    return fmean(values), half


def chats(seed: int = 7) -> Workload:
    """More chats than will be asked for: prompts of 40 to 200 tokens, answers log-normal between the same."""
    dice = Dice("dashboard", seed)
    jobs = (
        Job(prompt=dice.prompt(dice.between(40, 200)), max_tokens=dice.log_normal(40, 200)) for _ in range(NUM_JOBS)
    )
    return Workload("dashboard", NUM_CLIENTS, NUM_ROUNDS * tuple(jobs))


def measure(server: LocalServer, num_pairs: int, block_s: float) -> tuple[list[Block], Reader]:
    """Blocks in the order off on on off …, and the last reader."""
    blocks, reader = [], Reader(server.url)
    for index in range(2 * num_pairs):
        has_reader = index % 4 in (1, 2)
        if has_reader:
            reader = Reader(server.url)
            reader.start()
            time.sleep(1.0)  # the last minute has been told
        before = Sample.take(server)
        time.sleep(block_s)
        blocks.append(Block.between(before, Sample.take(server), has_reader=has_reader))
        if has_reader:
            reader.leave()
    return blocks, reader


def report(blocks: Sequence[Block], reader: Reader, block_s: float) -> bool:
    """Print the figures; whether the cost holds the target."""
    pairs = [(blocks[i], blocks[i + 1]) for i in range(0, len(blocks), 2)]
    pairs = [(a, b) if b.has_reader else (b, a) for a, b in pairs]
    all_us = fmean(off.all_us for off, _ in pairs)
    http, http_half = interval([on.http_us - off.http_us for off, on in pairs])
    whole, whole_half = interval([on.all_us - off.all_us for off, on in pairs])
    num_steps, http_us = fmean(block.num_steps for block in blocks), fmean(off.http_us for off, _ in pairs)
    print(f"{len(pairs)} pairs of blocks of {block_s:g} s, {num_steps:,.0f} steps each")
    print(f"CPU time without a reader: {all_us:,.0f} µs a step, of it {http_us:,.0f} µs HTTP")
    print(f"more with a reader: {http:+.1f} ± {http_half:.1f} µs a step in HTTP's thread,")
    print(f"  which is {http / all_us:+.2%} ± {http_half / all_us:.2%} of the process's CPU time;")
    print(
        f"  in the whole process {whole:+.1f} ± {whole_half:.1f} µs, {whole / all_us:+.2%} ± {whole_half / all_us:.2%}"
    )
    message = json.loads(reader.last.removeprefix(b"data: "))
    print(f"the last reader got {reader.num_bytes / 1e3 / (block_s + 1):,.0f} kB/s in {reader.num_messages} messages,")
    print(f"  and the server's own account of what making them takes: {message['cost']['cpu_share']:.2%}")
    return (http + http_half) / all_us < TARGET_SHARE


class MadeUpRunner:
    """Brings a token for each row that samples, in no time."""

    def execute(self, plan: StepPlan) -> StepResult:
        """One step."""
        rows = [(7,) if row.logits_from < row.num_tokens else () for row in plan.rows]
        return StepResult(rows, execute_ns=12_000_000)

    def close(self) -> None:
        """Nothing to release."""


def made_up_run(num_steps: int, step_ns: int = 14_000_000) -> tuple[Scheduler, list[tuple[int, list[Event]]]]:
    """Events by time of a run in which 32 rows are busy; the scheduler is as it stands at its end."""
    kv = KVCache(num_blocks=4096, block_size=32, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=NUM_CLIENTS, max_num_batched_tokens=256, max_model_len=8192)
    scheduler, clock = Scheduler(limits, kv, make_policy("continuous")), [10**9]
    loop, dice, turns, num_added = StepLoop(scheduler, MadeUpRunner(), lambda: clock[0]), Dice("micro", 7), [], 0
    for _ in range(num_steps):
        while len(scheduler.requests) < NUM_CLIENTS + 4:
            params = SamplingParams(max_tokens=dice.log_normal(40, 200), ignore_eos=True)
            scheduler.add(Request(num_added, dice.prompt(dice.between(40, 200)), params), clock[0])
            num_added += 1
        clock[0] += step_ns
        turns.append((clock[0], loop.turn().events))
    return scheduler, turns


class Stopwatch:
    """CPU time of this thread, by what it was spent on."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = {}

    def time(self, name: str, work: Callable[[], object]) -> object:
        """Do the work and count it."""
        begin_ns = time.thread_time_ns()
        result = work()
        self.spent_ns[name] = self.spent_ns.get(name, 0) + time.thread_time_ns() - begin_ns
        return result


def micro(num_steps: int) -> None:
    """Print CPU time per step of history, live state, messages and their encoding, and looks at blocks and line."""
    scheduler, turns = made_up_run(num_steps)
    history, watch, encode = History(), Stopwatch(), msgspec.json.Encoder().encode
    state = LiveState(
        history,
        now_ns=0,
        since_ns=0,
        num_slots=NUM_CLIENTS,
        num_blocks=4096,
        ask_blocks=lambda: history.receive([watch.time("blocks", lambda: scheduler.block_event(0))]),  # type: ignore[list-item]
        ask_line=lambda: history.receive([watch.time("line", lambda: scheduler.line_event(1024, 0))]),  # type: ignore[list-item]
    )
    reader, next_ns = LiveReader(state, name_of=lambda i: f"cmpl-{i:032x}", sees_all=True, server={}), 0
    for now_ns, events in turns:
        history.receive(events)
        if now_ns >= next_ns:
            next_ns = now_ns + 100_000_000
            watch.time("history", history.catch_up)
            watch.time("state", lambda now_ns=now_ns: state.catch_up(now_ns))
            message = watch.time("messages", lambda now_ns=now_ns: reader.message(now_ns))
            watch.time("encoding", lambda message=message: encode(message))
    watch.spent_ns["state"] -= watch.spent_ns["blocks"] + watch.spent_ns.get("line", 0)
    for name, spent_ns in watch.spent_ns.items():
        where = "engine's thread" if name in ("blocks", "line") else "HTTP's thread"
        print(f"{name:<9} {spent_ns / num_steps / 1e3:6.1f} µs a step ({where})")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where the cost may be above the target."""
    parser = argparse.ArgumentParser(prog="benchmarks.dashboard", description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2", help="as for serve (default: smollm2)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks (default: 12)")
    parser.add_argument("--block-s", type=float, default=6.0, help="seconds a block (default: 6)")
    parser.add_argument("--micro", action="store_true", help="time the parts on a made-up run instead")
    arguments = parser.parse_args(argv)
    if arguments.micro:
        micro(6000)
        return 0
    options = ["--max-num-seqs", str(NUM_CLIENTS), "--stats-interval", "0"]
    with LocalServer(arguments.model, options) as server:
        total_s = 2 * arguments.pairs * (arguments.block_s + 1.5) + 2 * SETTLE_S
        load = threading.Thread(target=run_load, args=(chats(), Target(url=server.url, stop_s=total_s)), daemon=True)
        load.start()
        time.sleep(SETTLE_S)
        blocks, reader = measure(server, arguments.pairs, arguments.block_s)
        holds = report(blocks, reader, arguments.block_s)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
