"""Sends one generation to its client, streamed or whole, and notices when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.types import Receive, Scope, Send

from everystop.core.errors import EverystopError
from everystop.observe.history import Answer, Client
from everystop.observe.request_clock import RequestClock, RequestTimes
from everystop.server.board import Generation
from everystop.server.deadline import Deadline
from everystop.server.errors import ClientGone, SlowReader, TimedOut, code_of, failure_response, log_unforeseen
from everystop.server.field_names import in_names
from everystop.server.inquiry import progress_line
from everystop.server.prompt_report import LARGE_ENTRIES
from everystop.server.replies import Writer, usage_object
from everystop.server.state import ServerState
from everystop.server.texts import Gathering, Part, Piece
from everystop.server.times import metrics_object, timings_object
from everystop.server.unsent import send_body, unsent_of
from everystop.server.wishes import NO_WISHES, Wishes

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0
NO_NAMES: Mapping[str, str] = MappingProxyType({})
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]


class Reply:
    """An ASGI response that serves a generation; whatever ends it, the generation is closed and its blocks go back.

    It notes in `client` when bytes were given to the socket. With a `deadline` the generation ends there. Errors call
    fields by `names`.
    """

    is_streamed = False

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        client: Client,
        writer: Writer,
        num_choices: int,
        wishes: Wishes = NO_WISHES,
        deadline: Deadline | None = None,
        names: Mapping[str, str] = NO_NAMES,
    ) -> None:
        self._state = state
        self._names = names
        self._deadline = deadline
        self._board = state.board
        self._generation = generation
        self._client = client
        self._writer = writer
        self._num_choices = num_choices
        self._wishes = wishes
        self._clock: RequestClock | None = None
        if client.num == 1 and (wishes.metrics or wishes.timings):
            self._clock = RequestClock(state.history, client)
        self._started = False
        self._status = 0
        self._error_code = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(scope, receive))
        timer = self._start_timer()
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            pass
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            self._board.close(self._generation)
            self._note_end()
            self._client.answer = self._as_answered()
            self._state.done(self._client)

    def _as_answered(self) -> Answer:
        """What the client got."""
        usage, reasons = self._counts(), {choice.finish_reason or "" for choice in self._generation.choices}
        finish_reason = "abort" if self._client.has_left else "error" if self._error_code else "+".join(sorted(reasons))
        return Answer(self._status, self._error_code, *usage, finish_reason, self.is_streamed)

    def _start_timer(self) -> asyncio.TimerHandle | None:
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().call_later(self._deadline.left_s(), self._time_out, self._deadline)

    def _time_out(self, deadline: Deadline) -> None:
        if self._client.delivered_ns is None:
            self._board.end(self._generation, TimedOut(deadline.limit_s, is_own=deadline.is_own))

    async def _watch(self, scope: Scope, receive: Receive) -> None:
        """The body has been read: the next that can come is the end of the connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client.has_left = self._client.delivered_ns is None
        self._note_end()
        self._board.end(self._generation, SlowReader() if "is_slow" in scope else ClientGone())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(scope, send)
        except ClientGone:
            raise
        except Exception as error:
            if self._started:
                raise
            response = failure_response(in_names(error, self._names), scope)
            self._status, self._error_code = response.status_code, code_of(error)
            await response(scope, receive, send)
        self._note_end()

    async def _send(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started, self._status = True, 200
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _note_first(self) -> None:
        if self._client.first_sent_ns is None:
            self._client.first_sent_ns = time.monotonic_ns()

    def _note_end(self) -> None:
        if self._client.delivered_ns is None:
            self._client.delivered_ns = time.monotonic_ns()

    def _counts(self) -> tuple[int, int, int]:
        """Tokens of the prompts, of those the cached ones, and of the output."""
        choices = self._generation.choices
        num_cached = sum(choice.num_cached_tokens for choice in choices[:: self._num_choices])
        num_output = sum(choice.num_tokens for choice in choices)
        return self._generation.num_prompt_tokens, num_cached, num_output

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_cached, num_output = self._counts()
        return usage_object(num_prompt, num_output, num_cached)

    def _times(self) -> RequestTimes | None:
        """What is known of the request's times; of several sequences nothing. No fault in this may cost the answer."""
        try:
            return None if self._clock is None else self._clock.read()
        except Exception:
            logger.exception("the times of a request could not be read; serving goes on")
            return None

    def _attach_times(self) -> None:
        """Have what the client wants to know of times beside the end of its answer."""
        if self._wishes.metrics or self._wishes.timings:
            times = self._times()
            beside = {"metrics": metrics_object(times)} if self._wishes.metrics else {}
            self._writer.attach(beside | ({"timings": timings_object(times)} if self._wishes.timings else {}))


class WholeReply(Reply):
    """One JSON body once all choices have ended."""

    async def _send(self, scope: Scope, send: Send) -> None:
        body = await self._written()
        await self._start(send, [*JSON_HEADERS, (b"content-length", b"%d" % len(body))])
        self._note_first()
        await send_body(scope, send, body)

    async def _written(self) -> bytes:
        """The body, of which nothing but itself is kept."""
        texts: list[list[Piece]] = [[] for _ in self._generation.choices]
        while self._generation.num_unfinished:
            for part in await self._board.parts(self._generation):
                if part.piece is not None:
                    texts[part.choice].append(part.piece)
        reasons = [choice.finish_reason or "" for choice in self._generation.choices]
        self._attach_times()
        write = partial(self._writer.whole, texts, reasons, self._usage())
        report = self._generation.report
        is_large = (report is not None and report.is_large) or _num_entries(texts) > LARGE_ENTRIES
        return await asyncio.to_thread(write) if is_large else write()


def _num_entries(texts: Sequence[Sequence[Piece]]) -> int:
    """How many tokens an answer tells with their log-probabilities, alternatives included."""
    pieces = [piece for choice in texts for piece in choice]
    told = sum(1 + len(piece.told.top) for piece in pieces if piece.told is not None)
    return told + sum(1 + len(info.top) for piece in pieces for info in piece.tokens)


class StreamReply(Reply):
    """Server-sent events, one a piece. It begins with the first output, so what the engine refuses is a plain 400.

    A client that wishes to be told of progress may get comments before, which say how the request waits; then a refusal
    is an event. Once the answer has begun, events go straight to the connection, past whoever only looks at its head.
    """

    is_streamed = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_output = 0  # tokens of the choices as far as chunks have told of them
        self._counted: dict[int, int] = {}

    async def _send(self, scope: Scope, send: Send) -> None:
        unsent_of(scope).growing = self._generation.num_pending_bytes
        wire: Send = scope.get("wire", send)
        try:
            await self._stream(send, wire)
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, EverystopError):
                log_unforeseen(error, scope)
            self._error_code = code_of(error)
            await wire({"type": "http.response.body", "body": self._writer.failed(in_names(error, self._names))})

    async def _stream(self, send: Send, wire: Send) -> None:
        generation, writer = self._generation, self._writer
        opened: set[int] = set()
        tells_more = self._wishes.continuous_usage or self._wishes.timings
        gather = Gathering(generation.choices, self._wishes.interval) if self._wishes.interval > 1 else None
        while generation.num_unfinished:
            events: list[bytes] = []
            try:
                parts = await self._parts(send, wire)
                for part in parts if gather is None else gather.of(parts):
                    if tells_more:
                        self._attach_so_far(part.choice)
                    if part.choice not in opened:
                        opened.add(part.choice)
                        events.append(writer.first_event(part.choice))
                    events.append(writer.event(part))
            except EverystopError:
                events += [] if gather is None else map(writer.event, gather.rest())
                raise
            finally:  # what came before a failure is sent before it
                if events:
                    if not self._started:
                        await self._start(send, SSE_HEADERS)
                    await wire({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                    self._note_first()
        self._attach_times()
        await wire({"type": "http.response.body", "body": writer.ended(self._usage())})

    def _attach_so_far(self, index: int) -> None:
        """Have what the client wants in every chunk beside the next one, which is of choice `index`."""
        beside: dict[str, Any] = {}
        if self._wishes.continuous_usage:
            num_tokens = self._generation.choices[index].num_tokens
            self._num_output += num_tokens - self._counted.get(index, 0)
            self._counted[index] = num_tokens
            beside["usage"] = usage_object(self._generation.num_prompt_tokens, self._num_output)
        if self._wishes.timings:
            beside["timings"] = timings_object(self._times())
        self._writer.attach(beside)

    async def _parts(self, send: Send, wire: Send) -> Iterator[Part]:
        """The next outputs; meanwhile a client that wants to know is told every second how it waits."""
        if not self._wishes.progress:
            return await self._board.parts(self._generation)
        news = asyncio.ensure_future(self._board.parts(self._generation))
        try:
            self._ask_line()
            while not (await asyncio.wait({news}, timeout=PROGRESS_S))[0]:
                line = progress_line(self._state.history, self._client)
                self._ask_line()
                if line is not None:
                    if not self._started:
                        await self._start(send, SSE_HEADERS)
                    await wire({"type": "http.response.body", "body": f": {line}\n\n".encode(), "more_body": True})
            return news.result()
        finally:
            news.cancel()

    def _ask_line(self) -> None:
        """Have the place in line be known by the next second."""
        if self._client.first_sent_ns is None:
            self._state.ask_line()
