"""Sends a workload to an OpenAI-compatible server and reports what its clients saw.

    python benchmarks/loadgen.py straggler --url http://127.0.0.1:8000 --json out.json

Closed loop: N clients, each with one request at a time, take the jobs in order. Open loop (workloads with arrival
times): each job is sent at its time. Answers are streamed. TTFT runs from the request's first byte sent to the first
event with text, ITL between two such events, E2E to the end of the stream. A server that sends several tokens in one
event shows fewer events a token; that figure is printed, since its ITL is then not one of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WORKLOADS, Job, Workload, make_workload

PERCENTILES = (50, 90, 95, 99)


class Choice(msgspec.Struct):
    """The part of a chunk's choice that is looked at."""

    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class Chunk(msgspec.Struct):
    """One event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class Record:
    """What one client saw of one request; times in seconds from the start of the run."""

    job: int
    group: str
    num_prompt: int
    max_tokens: int
    sent_s: float = 0.0
    end_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    status: int = 0
    error: str | None = None

    @property
    def is_exact(self) -> bool:
        """The usage is what the workload asked for."""
        usage = self.usage
        return usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (
            self.num_prompt,
            self.max_tokens,
        )


class Stream(asyncio.Protocol):
    """One connection; `send` runs one request over it and fills its record."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._record: Record
        self._done: asyncio.Future[None] | None = None
        self._rest = b""
        self._now_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's hook."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def send(self, record: Record, request: bytes) -> None:
        """Send a request; returns when its answer has ended."""
        self._record, self._rest = record, b""
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        record.sent_s = time.perf_counter() - self._started_s
        self._transport.write(request)
        await self._done

    @property
    def is_closed(self) -> bool:
        """The connection cannot be used again."""
        return self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """asyncio's hook."""
        self._now_s = time.perf_counter() - self._started_s
        self._parser.feed_data(data)

    def on_status(self, status: bytes) -> None:
        """The parser's hook."""
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """The parser's hook: cut into events."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]" and not data.startswith(b":"):
                self._take(decode_chunk(data))

    def _take(self, chunk: Chunk) -> None:
        record = self._record
        if chunk.error is not None:
            record.error = json.dumps(chunk.error)
        if chunk.usage is not None:
            record.usage = chunk.usage
        for choice in chunk.choices:
            if choice.text:
                record.token_s.append(self._now_s)
                record.text += choice.text
            record.finish_reason = choice.finish_reason or record.finish_reason

    def on_message_complete(self) -> None:
        """The parser's hook."""
        if self._record.status != 200:
            self._record.error = f"HTTP {self._record.status}: {self._rest.decode(errors='replace')[:200]}"
        self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's hook."""
        if self._done is not None and not self._done.done():
            self._record.error = f"connection lost: {exc}"
            self._now_s = time.perf_counter() - self._started_s
            self._finish()

    def _finish(self) -> None:
        self._record.end_s = self._now_s
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Load:
    """A run of one workload against one server."""

    def __init__(self, workload: Workload, arguments: argparse.Namespace) -> None:
        self._workload = workload
        self._arguments = arguments
        parts = urlsplit(arguments.url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._started_s = 0.0
        self.records = [Record(i, job.group, len(job.prompt), job.max_tokens) for i, job in enumerate(workload.jobs)]

    async def run(self) -> list[Record]:
        """Send everything; returns the records."""
        self._started_s = time.perf_counter()
        num_clients = self._arguments.clients or self._workload.num_clients
        if num_clients is None:
            await asyncio.gather(*(self._at_its_time(i) for i in range(len(self.records))))
        else:
            queue = iter(range(len(self.records)))
            await asyncio.gather(*(self._client(queue) for _ in range(num_clients)))
        return self.records

    async def _client(self, queue: Any) -> None:
        stream = None
        for i in queue:
            if stream is None or stream.is_closed:
                stream = await self._connect()
            await stream.send(self.records[i], self._request(self._workload.jobs[i]))

    async def _at_its_time(self, i: int) -> None:
        job = self._workload.jobs[i]
        await asyncio.sleep(job.at_s or 0.0)
        stream = await self._connect()
        await stream.send(self.records[i], self._request(job))

    async def _connect(self) -> Stream:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(self._started_s), self._host, self._port)
        return stream

    def _request(self, job: Job) -> bytes:
        arguments = self._arguments
        body = {
            "prompt": list(job.prompt),
            "max_tokens": job.max_tokens,
            "temperature": arguments.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if arguments.model is not None:
            body["model"] = arguments.model
        if arguments.temperature > 0:
            body["seed"] = arguments.seed
        data = msgspec.json.encode(body | json.loads(arguments.extra))
        key = f"Authorization: Bearer {arguments.api_key}\r\n" if arguments.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at or below which `percent` of the values lie, interpolated; NaN of nothing."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    position = (len(ranked) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (position - low)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and the largest, in milliseconds."""
    mean = sum(values) / len(values) if values else float("nan")
    rows = {
        "mean": mean,
        **{f"p{p}": percentile(values, p) for p in PERCENTILES},
        "max": max(values, default=float("nan")),
    }
    return {name: value * 1e3 for name, value in rows.items()}


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """All figures of a run or of one of its groups."""
    good = [record for record in records if record.error is None]
    wall_s = max((r.end_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    num_output = sum(r.usage.completion_tokens for r in good if r.usage)
    num_prompt = sum(r.usage.prompt_tokens for r in good if r.usage)
    num_events = sum(len(r.token_s) for r in good)
    return {
        "requests": len(records),
        "errors": len(records) - len(good),
        "exact_usage": sum(r.is_exact for r in good),
        "wall_s": wall_s,
        "output_tokens": num_output,
        "prompt_tokens": num_prompt,
        "output_tok_s": num_output / wall_s if wall_s else 0.0,
        "total_tok_s": (num_output + num_prompt) / wall_s if wall_s else 0.0,
        "requests_s": len(good) / wall_s if wall_s else 0.0,
        "events_per_token": num_events / num_output if num_output else 0.0,
        "ttft_ms": distribution([r.token_s[0] - r.sent_s for r in good if r.token_s]),
        "itl_ms": distribution([b - a for r in good for a, b in zip(r.token_s, r.token_s[1:], strict=False)]),
        "e2e_ms": distribution([r.end_s - r.sent_s for r in good]),
        "decode_ms": distribution([r.token_s[-1] - r.token_s[0] for r in good if r.token_s]),
    }


def read_counters(url: str, api_key: str | None) -> dict[str, float]:
    """The server's own counters that tell what work was done; empty where there are none."""
    wanted = (
        "steps",
        "computed_prompt_tokens",
        "generation_tokens",
        "num_preemptions",
        "prefix_cache_hits",
        "evicted_blocks",
    )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    counters: dict[str, float] = {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers), timeout=5) as answer:
            for line in answer.read().decode().splitlines():
                name = line.partition("{")[0].removeprefix("everystop_").removesuffix("_total")
                if name in wanted and not line.startswith("#"):
                    counters[name] = float(line.rpartition(" ")[2])
    except OSError:
        return {}
    return counters


def report(summary: dict[str, Any]) -> str:
    """The figures of `summarize`, readable."""
    lines = [
        f"requests {summary['requests']}, errors {summary['errors']}, exact usage {summary['exact_usage']}, "
        f"wall {summary['wall_s']:.2f} s",
        f"output {summary['output_tok_s']:,.0f} tok/s, total {summary['total_tok_s']:,.0f} tok/s, "
        f"{summary['requests_s']:.2f} requests/s, {summary['events_per_token']:.3f} events a token",
    ]
    for name in ("ttft", "itl", "e2e", "decode"):
        values = summary[f"{name}_ms"]
        lines.append(f"{name:>7} ms  " + "  ".join(f"{key} {value:,.1f}" for key, value in values.items()))
    return "\n".join(lines)


def digest(records: Sequence[Record]) -> str:
    """A hash over all answers in the order of jobs: equal where two runs gave the same text."""
    return hashlib.sha256("\0".join(record.text for record in records).encode()).hexdigest()[:16]


def main() -> int:
    """Run, print, write; exit code 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model's name, for servers that insist on one")
    parser.add_argument("--api-key")
    parser.add_argument("--clients", type=int, help="clients with one request at a time (default: the workload's)")
    parser.add_argument("--seed", type=int, default=7, help="of the workload; another one makes other prompts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--extra", default="{}", help="more fields of the request, as JSON")
    parser.add_argument("--json", type=Path, help="write figures and records to this file")
    arguments = parser.parse_args()
    arguments.url = arguments.url.rstrip("/")
    before = read_counters(arguments.url, arguments.api_key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(Load(make_workload(arguments.workload, arguments.seed), arguments).run())
    after = read_counters(arguments.url, arguments.api_key)
    groups = sorted({record.group for record in records})
    summaries = {"all": summarize(records)}
    if len(groups) > 1:
        summaries |= {group: summarize([r for r in records if r.group == group]) for group in groups}
    counters = {name: after[name] - before.get(name, 0.0) for name in after}
    for name, summary in summaries.items():
        print(f"--- {arguments.workload}: {name}\n{report(summary)}")
    print(
        f"answers {digest(records)}; server: " + ", ".join(f"{name} {value:,.0f}" for name, value in counters.items())
    )
    for record in [record for record in records if record.error is not None][:5]:
        print(f"request {record.job}: {record.error}")
    if arguments.json is not None:
        result = {
            "workload": arguments.workload,
            "seed": arguments.seed,
            "url": arguments.url,
            "answers": digest(records),
            "server": counters,
            "figures": summaries,
            "records": [asdict(r) | {"usage": msgspec.to_builtins(r.usage)} for r in records],
        }
        arguments.json.write_bytes(msgspec.json.encode(result))
    return 1 if summaries["all"]["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
