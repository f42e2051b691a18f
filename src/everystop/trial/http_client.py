"""One client of an OpenAI-compatible server: sends a request on its connection and notes what comes back, and when."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httptools
import msgspec

from everystop.server_url import ServerUrl
from everystop.sim.workloads import Job
from everystop.trial.prompt_forms import PromptForm


class Delta(msgspec.Struct):
    """A piece of a chat's message: of the answer itself, or of what some servers send as the thinking before it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """What is read of a chunk's choice, of a completion or a chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        """Its text, whatever it is part of."""
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning_content or self.delta.reasoning or "") + (self.delta.content or "")


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
    """The server (raises ConfigError for a `url` that is none), and what is added to each request. `tls` checks the
    certificate of an https server, if it is not one that the system trusts. `form` is what prompts are sent as, `extra`
    are more fields of every request. `timeout_s` ends one request, `max_run_s` the run; `stop_s` cuts off what is under
    way by then, which is no error. `tenant_header` carries the name of a job's tenant; a request is named by its job's
    index behind `id_prefix`, where there is one.
    """

    url: str
    tls: ssl.SSLContext | None = None
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    form: PromptForm = PromptForm.IDS
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    max_run_s: float = 1200.0
    stop_s: float | None = None
    tenant_header: str | None = None
    id_prefix: str | None = None
    where: ServerUrl = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", ServerUrl.parse(self.url))
        if self.tls is None:
            object.__setattr__(self, "tls", self.where.tls())

    def request_id(self, index: int) -> str:
        """What the request of that job is named; there must be a prefix."""
        assert self.id_prefix is not None, "a request without a prefix has no name"
        return f"{self.id_prefix}{index}"

    def request(self, job: Job, index: int = 0) -> bytes:
        """The HTTP request for a job, which is number `index` of its workload."""
        body: dict[str, Any] = {
            **self.form.fields(job),
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {
            "model": self.model,
            "seed": self.seed,
            "ttft_target_ms": job.ttft_target_ms,
            "itl_target_ms": job.itl_target_ms,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        data = msgspec.json.encode(body | self.extra)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        tenant = f"{self.tenant_header}: {job.tenant}\r\n" if self.tenant_header and job.tenant else ""
        name = f"x-request-id: {self.request_id(index)}\r\n" if self.id_prefix is not None else ""
        head = (
            f"POST {self.where.prefix}{self.form.path} HTTP/1.1\r\nHost: {self.where.netloc}\r\n{key}{tenant}{name}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(slots=True)
class ClientRecord:
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
        self._record: ClientRecord
        self._ended: asyncio.Future[None] | None = None
        self._read_s = 0.0
        self._refusal = b""

    async def send(self, record: ClientRecord, request: bytes, timeout_s: float) -> None:
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
            if piece := choice.piece:
                record.event_s.append(self._read_s)
                record.text += piece
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
