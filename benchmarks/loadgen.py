"""Sends a workload to an OpenAI-compatible server and reports what its clients saw.

    python -m benchmarks.loadgen --url http://127.0.0.1:8000 --workload chat --out chat.json

Jobs without a time are a closed loop: N clients, each with one request at a time, take them in order. Jobs with a time
are an open loop: each is sent at its time on a connection of its own. All answers are streamed. TTFT runs from the
first byte sent to the first event with text, ITL between two events with text, E2E to the end of the stream. A server
that puts several tokens into one event shows fewer events a token, and its ITL is then not one of tokens: the figure
is printed. So is the generator's own CPU time, which it may have taken from a server on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from benchmarks.workloads import DEFAULT_SEED, MAKERS, Job, Workload, make_workload, read_workload

PERCENTILES = (50, 90, 95, 99)
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_JOBS = 100_000


class Choice(msgspec.Struct):
    """What is read of a chunk's choice."""

    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """`usage`, which comes in the last chunk."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and what is added to each request. `timeout_s` ends one request, `max_run_s` the run; `stop_s` cuts
    off what is under way by then, which is no error. `tenant_header` carries the name of a job's tenant.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    max_run_s: float = 1200.0
    stop_s: float | None = None
    tenant_header: str | None = None

    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def request(self, job: Job) -> bytes:
        """The HTTP request for a job."""
        body: dict[str, Any] = {
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": job.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: value for name, value in (("model", self.model), ("seed", self.seed)) if value is not None}
        data = msgspec.json.encode(body | self.extra)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        tenant = f"{self.tenant_header}: {job.tenant}\r\n" if self.tenant_header and job.tenant else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n{key}{tenant}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(slots=True)
class Record:
    """What one client saw of one request; times in seconds from the start of the run, -1 where it did not happen.

    `is_cut` says that the run ended first, as it was told to.
    """

    job: int
    group: str
    num_prompt: int
    max_tokens: int
    sent_s: float = -1.0
    end_s: float = -1.0
    event_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    status: int = 0
    is_done: bool = False
    is_cut: bool = False
    error: str | None = None

    @property
    def is_exact(self) -> bool:
        """`usage` is there and says what the job asked for."""
        wanted = (self.num_prompt, self.max_tokens)
        return self.usage is not None and (self.usage.prompt_tokens, self.usage.completion_tokens) == wanted

    @property
    def text_hash(self) -> str:
        """Equal for equal texts."""
        return hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the text's hash in place of the text."""
        plain = asdict(self) | {"usage": msgspec.to_builtins(self.usage), "text_hash": self.text_hash}
        del plain["text"]
        return plain


class EventSplitter:
    """Cuts the bytes of an event stream into the data of its events, wherever the pieces break."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data


class Connection(asyncio.Protocol):
    """One connection that carries one request at a time and fills its record."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._splitter = EventSplitter()
        self._record: Record
        self._ended: asyncio.Future[None] | None = None
        self._read_s = 0.0
        self._refusal = b""

    async def send(self, record: Record, request: bytes, timeout_s: float) -> None:
        """Send a request; returns when its answer has ended, failed or taken too long, which the record tells."""
        self._record, self._splitter, self._refusal = record, EventSplitter(), b""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        record.sent_s = self._now_s()
        self._transport.write(request)
        try:
            await asyncio.wait_for(self._ended, timeout_s)
        except TimeoutError:
            record.end_s, record.error = self._now_s(), f"no end after {timeout_s:g} s"
            self.close()

    @property
    def is_closed(self) -> bool:
        """No further request can be sent."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close without waiting."""
        self._ended = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's hook."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """asyncio's hook."""
        if self._ended is None:
            return
        self._read_s = self._now_s()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"unreadable answer: {error}")
            self.close()

    def on_body(self, body: bytes) -> None:
        """The parser's hook."""
        if self._parser.get_status_code() != 200:
            self._refusal += body
            return
        for data in self._splitter.feed(body):
            if data == b"[DONE]":
                self._record.is_done = True
            else:
                self._take(decode_chunk(data))

    def _take(self, chunk: Chunk) -> None:
        record = self._record
        if chunk.error is not None:
            record.error = json.dumps(chunk.error)
        if chunk.usage is not None:
            record.usage = chunk.usage
        for choice in chunk.choices:
            if choice.text:
                record.event_s.append(self._read_s)
                record.text += choice.text
            record.finish_reason = choice.finish_reason or record.finish_reason

    def on_message_complete(self) -> None:
        """The parser's hook."""
        record = self._record
        record.status = self._parser.get_status_code()
        if record.status != 200:
            self._end(f"HTTP {record.status}: {self._refusal.decode(errors='replace')[:300]}")
        elif not record.is_done:
            self._end("the stream ended without [DONE]")
        else:
            self._end(None)
        if not self._parser.should_keep_alive():
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's hook."""
        if self._ended is not None:
            self._read_s = self._now_s()
            self._end(f"connection lost: {exc or 'closed by the server'}")

    def _end(self, error: str | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._record.error = self._record.error or error
            self._record.end_s = self._read_s
            self._ended.set_result(None)
            self._ended = None


@dataclass(slots=True)
class Run:
    """All records of one run; `cpu_s` is the generator's own processor time."""

    workload: str
    num_clients: int
    records: list[Record]
    cpu_s: float = 0.0

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


def run_load(workload: Workload, target: Target, num_clients: int | None = None) -> Run:
    """Send all jobs, wait for all ends; blocks. What went wrong stands in the records."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Load(workload, target, num_clients).run())


class Load:
    """One run of a workload."""

    def __init__(self, workload: Workload, target: Target, num_clients: int | None = None) -> None:
        self._jobs = workload.jobs
        self._target = target
        self._started_s = 0.0
        records = [Record(i, job.group, len(job.prompt), job.max_tokens) for i, job in enumerate(workload.jobs)]
        self._run = Run(workload.name, num_clients or workload.num_clients, records)

    async def run(self) -> Run:
        """Connect the clients, then start the clock and send."""
        waiting = iter([i for i, job in enumerate(self._jobs) if job.at_s is None])
        timed = [i for i, job in enumerate(self._jobs) if job.at_s is not None]
        try:
            connections = [await self._connect() for _ in range(self._run.num_clients)]
        except OSError as error:
            raise SystemExit(f"no server at {self._target.url}: {error}") from None
        cpu_s = time.process_time()
        self._started_s = time.perf_counter()
        tasks = [self._client(connection, waiting) for connection in connections]
        try:
            async with asyncio.timeout(self._target.stop_s or self._target.max_run_s):
                await asyncio.gather(*tasks, *(self._at_its_time(i) for i in timed))
        except TimeoutError:
            self._break_off()
        self._run.cpu_s = time.process_time() - cpu_s
        for connection in connections:
            connection.close()
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
        return time.perf_counter() - self._started_s

    async def _connect(self) -> Connection:
        host, port = self._target.address()
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(self._now_s), host, port)
        return connection

    async def _client(self, connection: Connection, waiting: Iterator[int]) -> None:
        """Take jobs until there are none left; a closed connection is replaced."""
        for i in waiting:
            await self._send(connection, i)
            if connection.is_closed:
                connection = await self._connect()
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
        await connection.send(self._run.records[i], self._target.request(self._jobs[i]), self._target.timeout_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    low, part = divmod((len(ranked) - 1) * percent / 100, 1)
    above = ranked[min(int(low) + 1, len(ranked) - 1)]
    return ranked[int(low)] + (above - ranked[int(low)]) * part


def distribution_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum of seconds, in milliseconds."""
    mean = sum(values_s) / len(values_s) if values_s else float("nan")
    figures = {"mean": mean} | {f"p{p}": percentile(values_s, p) for p in PERCENTILES}
    return {name: value * 1e3 for name, value in (figures | {"max": max(values_s, default=float("nan"))}).items()}


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """All figures of these records; times and rates of those that ended without error."""
    good = [record for record in records if record.error is None and not record.is_cut]
    num_cut = sum(record.is_cut for record in records)
    wall_s = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
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


def report(title: str, figures: dict[str, Any]) -> str:
    """The figures of `summarize`, readable."""
    lines = [
        f"{title}: {figures['requests']} requests, {figures['errors']} errors, {figures['exact_usage']} with exact "
        f"usage, {figures['without_usage']} without; wall {figures['wall_s']:.2f} s",
        f"  output {figures['output_tok_s']:,.0f} tok/s, with prompts {figures['total_tok_s']:,.0f} tok/s; "
        f"{figures['events_per_token']:.3f} events a token",
    ]
    for name in ("ttft", "itl", "e2e"):
        values = "  ".join(f"{key} {value:,.1f}" for key, value in figures[f"{name}_ms"].items())
        lines.append(f"  {name.upper():<5}ms  {values}")
    return "\n".join(lines)


def load_workload(name_or_file: str, seed: int) -> Workload:
    """A workload by name, or from a file of JSON lines."""
    if name_or_file in MAKERS:
        return make_workload(name_or_file, seed)
    path = Path(name_or_file)
    if not path.is_file():
        raise SystemExit(f"{name_or_file!r} is neither a file nor one of {', '.join(MAKERS)}")
    return read_workload(path.read_text(encoding="utf-8").splitlines())


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--workload", required=True, help=f"{', '.join(MAKERS)}, or a file of JSON lines")
    parser.add_argument("--workload-seed", type=int, default=DEFAULT_SEED, help="another one makes other prompts")
    parser.add_argument("--clients", type=int, help="clients of the closed loop (default: the workload's)")
    parser.add_argument("--limit", type=int, default=MAX_JOBS, help="send only the first N jobs")
    parser.add_argument("--out", type=Path, help="write figures and records to this JSON file")
    parser.add_argument("--model", help="for servers that insist on a name")
    parser.add_argument("--api-key")
    parser.add_argument("--tenant-header", metavar="NAME", help="header that carries the name of a job's tenant")
    parser.add_argument("--stop", type=float, metavar="SECONDS", help="cut off what is under way by then")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="sampling seed of every request")
    parser.add_argument("--extra", type=json.loads, default={}, help="more fields of every request, as JSON")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one request may take")
    parser.add_argument("--max-run", type=float, default=1200.0, help="seconds that the run may take")
    parser.add_argument("--allow-remote", action="store_true", help="send load to another machine")
    arguments = parser.parse_args(argv)
    if urlsplit(arguments.url).hostname not in LOOPBACK and not arguments.allow_remote:
        parser.error(f"{arguments.url} is not this machine; say --allow-remote if it is yours to load")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 1 when a request failed."""
    arguments = parse_arguments(argv)
    workload = load_workload(arguments.workload, arguments.workload_seed)
    workload = Workload(workload.name, workload.num_clients, workload.jobs[: arguments.limit])
    if any(job.tenant for job in workload.jobs) and arguments.tenant_header is None:
        raise SystemExit(f"{workload.name} has tenants; say by --tenant-header which header names them")
    target = Target(
        url=arguments.url.rstrip("/"),
        model=arguments.model,
        api_key=arguments.api_key,
        temperature=arguments.temperature,
        seed=arguments.seed,
        extra=arguments.extra,
        timeout_s=arguments.timeout,
        max_run_s=arguments.max_run,
        stop_s=arguments.stop,
        tenant_header=arguments.tenant_header,
    )
    run = run_load(workload, target, arguments.clients)
    figures = run.summary()
    print(report(workload.name, figures))
    if len(run.groups) > 1:
        print("\n".join(report(f"{workload.name}/{group}", run.summary(group)) for group in run.groups))
    print(f"answers {run.digest}; generator {run.cpu_s:.2f} s of CPU")
    for record in [record for record in run.records if record.error is not None][:5]:
        print(f"job {record.job}: {record.error}", file=sys.stderr)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(run.to_dict())))
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
