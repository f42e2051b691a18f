"""Clients that do as little as clients can: each streams one answer and counts its events, so that what is measured is
the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence

from everystop.core.errors import EverystopError

FIRST_ID, LAST_ID = 32, 126  # of the tokens in prompts: any vocabulary has them
TIMEOUT_S = 600.0


class CrowdFailed(EverystopError):
    """A client was not answered, or not long enough."""


class Stream(asyncio.Protocol):
    """One client: sends a request and counts the events that come back; reads nothing in them."""

    def __init__(self, request: bytes, crowd: Crowd) -> None:
        self._request = request
        self._crowd = crowd
        self.transport: asyncio.Transport
        self.num_events = 0
        self.head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        if not self.num_events:
            self.head += data
        self.num_events += data.count(b"\n\n")
        has_ended = b"data: [DONE]" in data or self._is_refused()
        self._crowd.note(self, has_ended=has_ended)

    def _is_refused(self) -> bool:
        """The server has said no, and why; head and reason may come one after the other."""
        if b"HTTP/1.1 200".startswith(self.head[:12]):
            return False
        head, end, body = self.head.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        return bool(end) and (length is None or len(body) >= int(length[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._crowd.note(self, has_ended=True)

    def last_words(self) -> str:
        """What the server said where it did not stream."""
        return self.head.decode(errors="replace").partition("\r\n\r\n")[2] or "nothing"


class Crowd:
    """A client for each request; waits until all have begun and the first of them has had so many events."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self._streams = [Stream(request, self) for request in requests]
        self._begun: set[Stream] = set()
        self._target = 0
        self._ended: Stream | None = None
        self._is_leaving = False
        self._news = asyncio.Event()

    async def connect(self, host: str, port: int) -> None:
        """Send all requests."""
        loop = asyncio.get_running_loop()
        for stream in self._streams:
            await loop.create_connection(lambda stream=stream: stream, host, port)  # type: ignore[misc]

    def note(self, stream: Stream, *, has_ended: bool) -> None:
        """Something has come for this one, or its answer has ended."""
        if has_ended and not self._is_leaving:
            self._ended = stream
            self._news.set()
        elif stream.num_events:
            self._begun.add(stream)
            if stream.num_events >= self._target and len(self._begun) == len(self._streams):
                self._news.set()

    async def advance(self, num_events: int) -> None:
        """Wait until all have begun and one of them has had so many more events; CrowdFailed where that does not come
        about.
        """
        self._target = max(stream.num_events for stream in self._streams) + num_events
        self._news.clear()
        if self._ended is None:
            try:
                await asyncio.wait_for(self._news.wait(), TIMEOUT_S)
            except TimeoutError:
                raise CrowdFailed(f"no answer has got on for {TIMEOUT_S:g} s") from None
        if self._ended is not None:
            raise CrowdFailed(f"an answer ended before the measurement; the server said: {self._ended.last_words()}")

    def leave(self) -> None:
        """Close all connections: what is not finished is aborted."""
        self._is_leaving = True
        for stream in self._streams:
            if hasattr(stream, "transport"):
                stream.transport.abort()


def requests_of(num_rows: int, context: int, max_tokens: int, seed: int) -> list[bytes]:
    """A request a row, each with a prompt of its own of `context` tokens that no prefix cache knows."""
    chance = random.Random(f"{seed}:{num_rows}:{context}")
    requests = []
    for _ in range(num_rows):
        body = json.dumps(
            {
                "prompt": [chance.randint(FIRST_ID, LAST_ID) for _ in range(context)],
                "max_tokens": max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    return requests
