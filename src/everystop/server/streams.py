"""Sends one generation to its client, streamed or whole, and notices when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import Receive, Scope, Send

from everystop.core.errors import EverystopError
from everystop.server.board import Board, Generation
from everystop.server.errors import ClientGone
from everystop.server.replies import DONE, ReplyWriter, error_event, usage_object
from everystop.server.texts import Piece

logger = logging.getLogger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]


class Reply:
    """An ASGI response that serves a generation; whatever ends it, the generation is closed and its blocks go back."""

    def __init__(self, board: Board, generation: Generation, writer: ReplyWriter, num_choices: int) -> None:
        self._board = board
        self._generation = generation
        self._writer = writer
        self._num_choices = num_choices
        self._started = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._send(send)
        except ClientGone:
            pass
        finally:
            watcher.cancel()
            self._board.close(self._generation)

    async def _watch(self, receive: Receive) -> None:
        """The body has been read: the next that can come is the end of the connection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._board.abandon(self._generation)

    async def _send(self, send: Send) -> None:
        raise NotImplementedError

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _usage(self) -> dict[str, Any]:
        choices = self._generation.choices
        num_cached = sum(choice.num_cached_tokens for choice in choices[:: self._num_choices])
        num_output = sum(choice.num_tokens for choice in choices)
        return usage_object(self._generation.num_prompt_tokens, num_output, num_cached)


class WholeReply(Reply):
    """One JSON body once all choices have ended."""

    async def _send(self, send: Send) -> None:
        texts: list[list[Piece]] = [[] for _ in self._generation.choices]
        while self._generation.num_unfinished:
            for part in await self._board.parts(self._generation):
                if part.piece is not None:
                    texts[part.choice].append(part.piece)
        reasons = [choice.finish_reason or "" for choice in self._generation.choices]
        body = self._writer.whole(texts, reasons, self._usage())
        await self._start(send, [*JSON_HEADERS, (b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body})


class StreamReply(Reply):
    """Server-sent events, one a piece; it begins with the first output, so what the engine refuses is a plain 400."""

    async def _send(self, send: Send) -> None:
        try:
            await self._stream(send)
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, EverystopError):
                logger.error("unforeseen error in a stream", exc_info=error)
            await send({"type": "http.response.body", "body": error_event(error) + DONE})

    async def _send_events(self, send: Send, events: list[bytes]) -> None:
        if not self._started:
            await self._start(send, SSE_HEADERS)
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})

    async def _stream(self, send: Send) -> None:
        generation, writer = self._generation, self._writer
        opened: set[int] = set()
        while generation.num_unfinished:
            events: list[bytes] = []
            try:
                for part in await self._board.parts(generation):
                    if part.choice not in opened:
                        opened.add(part.choice)
                        events.append(writer.first_event(part.choice))
                    events.append(writer.event(part))
            finally:  # what came before a failure is sent before it
                if events:
                    await self._send_events(send, events)
        await send({"type": "http.response.body", "body": writer.usage_event(self._usage()) + DONE})
