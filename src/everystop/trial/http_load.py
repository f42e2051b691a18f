"""Sends a workload to an OpenAI-compatible server and sums up what its clients saw.

Jobs without a time are a closed loop: N clients, each with one request at a time, take them in order. Jobs with a time
are an open loop: each is sent at its time on a connection of its own. All answers are streamed. TTFT runs from the
first byte sent to the first event with text, ITL between two events with text, E2E to the end of the stream. A server
that puts several tokens into one event shows fewer events a token, and its ITL is then not one of tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from everystop.core.durations import NS_PER_S
from everystop.core.errors import EverystopError
from everystop.observe.distribution import distribution_ms
from everystop.sim.workloads import Workload
from everystop.trial.http_client import ClientRecord, Connection, Target
from everystop.trial.interrupts import Interrupt, delayed_interrupts


class LoadError(EverystopError):
    """No load can be sent to that server."""


@dataclass(slots=True)
class LoadRun:
    """All records of one run; `cpu_s` is the generator's own processor time, `start_ns` when the run began, by the
    monotonic clock.
    """

    workload: str
    num_clients: int
    records: list[ClientRecord]
    cpu_s: float = 0.0
    start_ns: int = 0

    @property
    def digest(self) -> str:
        """A hash over all texts in the order of jobs: equal where two runs gave the same answers."""
        return hashlib.sha256(" ".join(record.text_hash for record in self.records).encode()).hexdigest()[:16]

    def summary(self, group: str | None = None) -> dict[str, Any]:
        """The figures of all records, or of one group's."""
        return summarize([record for record in self.records if group in (None, record.group)])

    @property
    def groups(self) -> list[str]:
        """Names of the groups."""
        return sorted({record.group for record in self.records})

    def to_dict(self) -> dict[str, Any]:
        """Plain data with all figures and records."""
        return {
            "workload": self.workload,
            "num_clients": self.num_clients,
            "generator_cpu_s": self.cpu_s,
            "answers": self.digest,
            "figures": {"all": self.summary(), **{group: self.summary(group) for group in self.groups}},
            "records": [record.to_dict() for record in self.records],
        }


Progress = Callable[[int, int], None]
"""Called with the number of requests that are over, and of all, whenever one ends."""


def _unwatched(num_over: int, num_all: int) -> None:
    """Nobody wants to know."""


def run_load(
    workload: Workload, target: Target, num_clients: int | None = None, progress: Progress = _unwatched
) -> LoadRun:
    """Send all jobs, wait for all ends; blocks. What went wrong stands in the records.

    Ctrl-C ends the load and raises KeyboardInterrupt; so do, with what they raise, the signals of `ended_in_order`.
    """
    load = Load(workload, target, num_clients, progress)
    with delayed_interrupts() as interrupt, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(_unless_interrupted(load.run(), interrupt))
    if run is None:
        raise KeyboardInterrupt
    return run


async def _unless_interrupted(load: Coroutine[Any, Any, LoadRun], interrupt: Interrupt) -> LoadRun | None:
    """The run, or None where a signal has cut it off."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(load)
    interrupt.then(lambda: loop.call_soon_threadsafe(task.cancel))
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


class Load:
    """One run of a workload."""

    def __init__(
        self,
        workload: Workload,
        target: Target,
        num_clients: int | None = None,
        progress: Progress = _unwatched,
    ) -> None:
        self._jobs = workload.jobs
        self._target = target
        self._progress = progress
        self._num_over = 0
        records = [ClientRecord(i, job.group, len(job.prompt), job.max_tokens) for i, job in enumerate(workload.jobs)]
        self._run = LoadRun(workload.name, num_clients or workload.num_clients, records)

    async def run(self) -> LoadRun:
        """Connect the clients, then start the clock and send."""
        untimed = [i for i, job in enumerate(self._jobs) if job.at_s is None]
        waiting = iter(untimed)
        timed = [i for i, job in enumerate(self._jobs) if job.at_s is not None]
        try:
            connections = [await self._connect() for _ in range(min(self._run.num_clients, len(untimed)))]
        except OSError as error:
            raise LoadError(
                f"no server at {self._target.url}: {error.strerror or error}; start it, or correct the URL"
            ) from None
        cpu_s = time.process_time()
        self._run.start_ns = time.monotonic_ns()
        begun: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._target.stop_s or self._target.max_run_s):
                for connection in connections:
                    begun.append(asyncio.create_task(self._client(connection, waiting)))
                    await asyncio.sleep(0)  # uvloop sends what is written in one turn in any order
                await asyncio.gather(*begun, *(self._at_its_time(i) for i in timed))
        except TimeoutError:
            self._break_off()
        except OSError as error:
            raise LoadError(
                f"the server at {self._target.url} takes no more connections: {error.strerror or error}"
            ) from None
        finally:
            for task in begun:
                task.cancel()
            for connection in connections:
                connection.close()
        self._run.cpu_s = time.process_time() - cpu_s
        return self._run

    def _break_off(self) -> None:
        """The time is over: what has not ended failed, or was cut off if the run was to end now."""
        is_planned = self._target.stop_s is not None
        for record in self._run.records:
            if record.end_s < 0 and record.error is None:
                record.is_cut = is_planned
                record.error = None if is_planned else f"not ended when the run was, after {self._target.max_run_s:g} s"
        if is_planned:
            self._run.records = [record for record in self._run.records if record.sent_s >= 0 or record.error]

    def _now_s(self) -> float:
        """Seconds since `start_ns`, by its own clock: a pause between looks at two would stay in all times."""
        return (time.monotonic_ns() - self._run.start_ns) / NS_PER_S

    async def _connect(self) -> Connection:
        where, loop = self._target.where, asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._now_s), where.host, where.port, ssl=self._target.tls
            )
        except ssl.SSLCertVerificationError as error:
            raise LoadError(where.distrust(error)) from None
        return connection

    async def _client(self, connection: Connection, waiting: Iterator[int]) -> None:
        """Take jobs until there are none left; a closed connection is replaced."""
        for i in waiting:
            if connection.is_closed:
                connection = await self._connect()
            await self._send(connection, i)
        connection.close()

    async def _at_its_time(self, i: int) -> None:
        await asyncio.sleep(self._jobs[i].at_s or 0.0)
        try:
            connection = await self._connect()
        except OSError as error:
            self._run.records[i].error = f"no connection: {error}"
            return
        try:
            await self._send(connection, i)
        finally:
            connection.close()

    async def _send(self, connection: Connection, i: int) -> None:
        await connection.send(self._run.records[i], self._target.request(self._jobs[i], i), self._target.timeout_s)
        self._num_over += 1
        self._progress(self._num_over, len(self._jobs))


def summarize(records: Sequence[ClientRecord]) -> dict[str, Any]:
    """All figures of these records; times and rates of those that ended without error."""
    good = [record for record in records if record.error is None and not record.is_cut]
    num_cut = sum(record.is_cut for record in records)
    sent = [record for record in records if record.sent_s >= 0]
    wall_s = max(0.0, max((r.end_s for r in sent), default=0.0) - min((r.sent_s for r in sent), default=0.0))
    num_output = sum(r.usage.completion_tokens for r in good if r.usage)
    num_prompt = sum(r.usage.prompt_tokens for r in good if r.usage)
    num_events = sum(len(r.event_s) for r in good)
    with_text = [r for r in good if r.event_s]
    return {
        "requests": len(records),
        "errors": len(records) - len(good) - num_cut,
        "cut": num_cut,
        "without_usage": sum(r.usage is None for r in good),
        "exact_usage": sum(r.is_exact for r in good),
        "wall_s": wall_s,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "events": num_events,
        "output_tok_s": num_output / wall_s if wall_s > 0 else 0.0,
        "total_tok_s": (num_output + num_prompt) / wall_s if wall_s > 0 else 0.0,
        "events_per_token": num_events / num_output if num_output else float("nan"),
        "ttft_ms": distribution_ms([r.event_s[0] - r.sent_s for r in with_text]),
        "itl_ms": distribution_ms([b - a for r in good for a, b in zip(r.event_s, r.event_s[1:], strict=False)]),
        "e2e_ms": distribution_ms([r.end_s - r.sent_s for r in good]),
        "decode_ms": distribution_ms([r.event_s[-1] - r.event_s[0] for r in with_text]),
    }
