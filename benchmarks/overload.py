"""Ten times as many requests as the server can serve: what it still serves, what a refusal takes, and how it recovers.

    python -m benchmarks.overload
    python -m benchmarks.overload --kind parrot --seconds 20

Requests are sent at their times whatever becomes of those before (an open loop), on connections that are kept. Served
tokens are counted by the server, its processor time by the system; the peak is measured before and after, since what
else runs beneath the machine comes and goes. Server and generator have cores of their own, which
are printed, unless `--shared` lets them compete. `parrot` serves through the same engine and HTTP, but sleeps instead
of computing: there a refusal weighs most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import uvloop

from benchmarks.local_server import COMMAND, LocalServer, difference

PARROT = (sys.executable, "-m", "benchmarks.parrot_server")
PLACES = 16
KV_MEMORY = "64MiB"
NUM_ALONE = 9
TICK_S = 1.0
AS_QUICK = 1.5
DRAIN_TIMEOUT_S = 300.0
WORDS = (
    "river",
    "stone",
    "light",
    "under",
    "green",
    "long",
    "small",
    "walks",
    "sings",
    "keeps",
    "turns",
    "never",
    "home",
)


@dataclass(slots=True)
class Answer:
    """How one request went: seconds from sending to its last byte, and the status; 0 for a lost connection."""

    status: int
    seconds: float


@dataclass(slots=True)
class Phase:
    """What was seen in one stretch of the run."""

    seconds: float = 0.0
    tokens: float = 0.0
    server_cpu_s: float = 0.0
    generator_cpu_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    num_late: int = 0

    @property
    def tokens_per_cpu_s(self) -> float:
        """Served tokens by the server's processor time."""
        return self.tokens / self.server_cpu_s

    def latencies_ms(self, status: int) -> list[float]:
        """Sorted, of the answers of that status."""
        return sorted(1000 * answer.seconds for answer in self.answers if answer.status == status)


class Connection(asyncio.Protocol):
    """One kept connection; asks one thing at a time, and reads no more of an answer than it must."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._num_wanted = -1
        self._sent_s = 0.0
        self._tell: Callable[[Answer], None] | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be used."""
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits is told."""
        self.is_open = False
        self._end(0)

    def ask(self, request: bytes, sent_s: float, tell: Callable[[Answer], None]) -> None:
        """Send; `tell` hears of the answer. Time counts from `sent_s`, when the request was due."""
        self._received.clear()
        self._num_wanted, self._sent_s, self._tell = -1, sent_s, tell
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Count, until all that was announced has come."""
        self._received += data
        if self._num_wanted < 0:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            _, _, length = bytes(self._received[:end]).lower().partition(b"content-length: ")
            self._num_wanted = end + 4 + int(length.partition(b"\r\n")[0])
        if len(self._received) >= self._num_wanted:
            self._end(int(self._received[9:12]))

    def _end(self, status: int) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(Answer(status, time.monotonic() - self._sent_s))

    def close(self) -> None:
        """Leave."""
        if self.is_open:
            self._transport.abort()


class Generator:
    """Sends requests over as many connections as are needed."""

    def __init__(self, url: str, num_prompt: int, num_output: int) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._num_prompt = num_prompt
        self._num_output = num_output
        self._dice = random.Random(1)
        self._idle: deque[Connection] = deque()
        self._busy: dict[Connection, None] = {}
        self._starting: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        """Requests without an answer."""
        return len(self._busy) + len(self._starting)

    def request(self) -> bytes:
        """A completion that nobody has asked for before."""
        prompt = " ".join(self._dice.choices(WORDS, k=self._num_prompt))
        fields = {"prompt": prompt, "max_tokens": self._num_output, "ignore_eos": True, "temperature": 0}
        body = json.dumps(fields).encode()
        return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    def send(self, answers: list[Answer]) -> None:
        """One request now; its answer is added some time."""
        sent_s, request = time.monotonic(), self.request()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._ask(connection, request, sent_s, answers)
                return
        task = asyncio.create_task(self._ask_on_new(request, sent_s, answers))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _ask_on_new(self, request: bytes, sent_s: float, answers: list[Answer]) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, *self._address)
        except OSError:
            answers.append(Answer(0, time.monotonic() - sent_s))
            return
        self._ask(connection, request, sent_s, answers)

    def _ask(self, connection: Connection, request: bytes, sent_s: float, answers: list[Answer]) -> None:
        def done(answer: Answer) -> None:
            answers.append(answer)
            self._busy.pop(connection, None)
            if connection.is_open:
                self._idle.append(connection)

        self._busy[connection] = None
        connection.ask(request, sent_s, done)

    async def alone(self) -> float:
        """Seconds that one request takes."""
        answers: list[Answer] = []
        self.send(answers)
        while not answers:
            await asyncio.sleep(0.001)
        if answers[0].status != 200:
            raise SystemExit(f"a single request got {answers[0].status}")
        return answers[0].seconds

    async def keep_busy(self, num: int, end_s: float, answers: list[Answer]) -> None:
        """A closed loop of so many clients."""
        while time.monotonic() < end_s:
            for _ in range(num - self.num_waiting):
                self.send(answers)
            await asyncio.sleep(0.005)

    async def flood(self, per_s: float, end_s: float, phase: Phase) -> None:
        """An open loop: evenly spaced requests, however the server fares. What is sent more than 50 ms late is
        counted: then the generator is too slow.
        """
        due_s = time.monotonic()
        while due_s < end_s:
            now_s = time.monotonic()
            if now_s < due_s:
                await asyncio.sleep(due_s - now_s)
            phase.num_late += time.monotonic() - due_s > 0.05
            self.send(phase.answers)
            due_s += 1 / per_s
            if time.monotonic() > due_s:
                await asyncio.sleep(0)

    async def wait(self, timeout_s: float) -> None:
        """Until all have their answers."""
        end_s = time.monotonic() + timeout_s
        while self.num_waiting and time.monotonic() < end_s:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """All leave."""
        for connection in (*self._busy, *self._idle):
            connection.close()


@contextmanager
def measured(server: LocalServer, phase: Phase) -> Iterator[None]:
    """Take the counters and the times of both sides before and after."""
    before, cpu_s, own_s, began_s = server.counters(), server.cpu_s(), time.process_time(), time.monotonic()
    yield
    phase.seconds = time.monotonic() - began_s
    phase.server_cpu_s = server.cpu_s() - cpu_s
    phase.generator_cpu_s = time.process_time() - own_s
    phase.tokens = difference(server.counters(), before)["generation_tokens"]


async def watch_memory(pid: int, into: list[float]) -> None:
    """The server's resident memory, every second."""
    while True:
        into.append(rss_mib(pid))
        await asyncio.sleep(TICK_S)


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def run(server: LocalServer, arguments: argparse.Namespace) -> bool:
    """All phases; whether all that is claimed held."""
    generator = Generator(server.url, arguments.num_prompt, arguments.num_output)
    alone_s = statistics.median([await generator.alone() for _ in range(NUM_ALONE)])
    print(f"alone: {1000 * alone_s:,.1f} ms")
    peak, flood, again = Phase(), Phase(), Phase()
    await keep_at_peak(server, generator, arguments.peak_seconds, peak)
    per_s = len(peak.answers) / peak.seconds
    print(f"peak: {per_s:,.1f} requests/s; {describe(peak)}")
    await generator.flood(arguments.times * per_s, time.monotonic() + 5, Phase())  # until the queue is full
    watcher = asyncio.create_task(watch_memory(server.pid, flood.rss_mib))
    with measured(server, flood):
        await generator.flood(arguments.times * per_s, time.monotonic() + arguments.seconds, flood)
    ended_s, num_left = time.monotonic(), generator.num_waiting
    watcher.cancel()
    print(f"flood: {len(flood.answers) / flood.seconds:,.0f} answers/s for {flood.seconds:.0f} s; {describe(flood)}")
    await generator.wait(DRAIN_TIMEOUT_S)
    drained_s = time.monotonic()
    while await generator.alone() > AS_QUICK * alone_s:
        if time.monotonic() > drained_s + DRAIN_TIMEOUT_S:
            break
    quick_s = time.monotonic()
    await keep_at_peak(server, generator, arguments.peak_seconds, again)
    print(f"peak again: {describe(again)}")
    generator.close()
    return judge(peak, again, flood, num_left, drained_s - ended_s, quick_s - drained_s)


async def keep_at_peak(server: LocalServer, generator: Generator, seconds: float, phase: Phase) -> None:
    """As many clients as keep all places taken, until all have their answers."""
    await generator.keep_busy(PLACES + 8, time.monotonic() + 3, [])
    with measured(server, phase):
        await generator.keep_busy(PLACES + 8, time.monotonic() + seconds, phase.answers)
    await generator.wait(DRAIN_TIMEOUT_S)


def describe(phase: Phase) -> str:
    """Tokens by processor time, and what the generator took."""
    return (
        f"{phase.tokens / phase.seconds:,.0f} tokens/s, {phase.tokens_per_cpu_s:,.0f} tokens per CPU second of the "
        f"server ({phase.server_cpu_s:.1f} s in {phase.seconds:.1f} s); generator {phase.generator_cpu_s:.1f} s of CPU"
    )


def judge(peak: Phase, again: Phase, flood: Phase, num_left: int, drain_s: float, quick_s: float) -> bool:
    """Print the figures beside what they must be."""
    ratio = flood.tokens_per_cpu_s / ((peak.tokens + again.tokens) / (peak.server_cpu_s + again.server_cpu_s))
    refusals = flood.latencies_ms(429)
    if not refusals:
        raise SystemExit("nobody was refused: this was no overload")
    p50, p99 = (refusals[int(share * (len(refusals) - 1))] for share in (0.5, 0.99))
    statuses = Counter(answer.status for answer in flood.answers)
    late = 100 * flood.num_late / max(1, len(flood.answers))
    rss = flood.rss_mib
    half = len(rss) // 2
    growth = statistics.mean(rss[half:]) - statistics.mean(rss[:half])
    claims = [
        (ratio >= 0.9, f"served tokens per CPU second: {100 * ratio:.1f} % of peak (at least 90 %)"),
        (p99 < 100, f"refusals: p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {refusals[-1]:.1f} ms (p99 under 100 ms)"),
        (abs(growth) < 8, f"memory: {min(rss):,.1f} to {max(rss):,.1f} MiB, second half {growth:+.1f} MiB (flat)"),
        (set(statuses) <= {200, 429}, f"answers by status: {dict(sorted(statuses.items()))} (200 and 429 only)"),
        (late < 1, f"requests sent late: {late:.2f} % (under 1 %, else the generator is the bottleneck)"),
        (
            True,
            f"recovery: {num_left} left at the end were served in {drain_s:.1f} s; quick again {quick_s:.2f} s later",
        ),
    ]
    for held, text in claims:
        print(f"{'held   ' if held else 'MISSED '} {text}")
    return all(held for held, _ in claims)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what is not known here goes to the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("model", "parrot"), default="model")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--times", type=float, default=10.0, help="of what the server can serve")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flood")
    parser.add_argument("--peak-seconds", type=float, default=20.0)
    parser.add_argument("--num-prompt", type=int, default=60, help="words of a prompt")
    parser.add_argument("--num-output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--queue", type=int, default=100, help="--max-num-queued-reqs of the server")
    parser.add_argument("--shared", action="store_true", help="server and generator compete for all cores")
    arguments, arguments.options = parser.parse_known_args(argv)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; exit code 1 when something did not hold."""
    arguments = parse_arguments(argv)
    cores = sorted(os.sched_getaffinity(0))
    shared = arguments.shared or len(cores) < 2
    own, servers = (cores, cores) if shared else (cores[-1:], cores[:-1])
    print(f"server on cores {servers}, generator on {own}; {arguments.times:g} times capacity")
    options = ["--max-num-seqs", str(PLACES), "--max-num-queued-reqs", str(arguments.queue)]
    if arguments.kind == "parrot":
        command = PARROT
    else:
        command, options = COMMAND, [*options, "--kv-cache-memory", KV_MEMORY]  # so that all of it has been used once
    options += arguments.options
    os.sched_setaffinity(0, servers)
    with LocalServer(arguments.model, options, command) as server:
        os.sched_setaffinity(0, own)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return 0 if runner.run(run(server, arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
