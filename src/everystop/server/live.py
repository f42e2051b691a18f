"""`GET /ui/stream`: what happens in the engine, as server-sent events, to a few readers at a time; `GET /ui/past`: what
it told before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.types import Receive, Scope, Send

from everystop import __version__
from everystop.core.durations import NS_PER_S
from everystop.core.errors import RequestError
from everystop.observe.live import LiveReader
from everystop.observe.live_past import PAST_NS, LivePast
from everystop.observe.live_state import LiveState
from everystop.observe.live_teller import Strangers, Teller
from everystop.server.errors import Overloaded
from everystop.server.fields import echo
from everystop.server.state import Phase, ServerState
from everystop.server.visibility import Viewer

logger = logging.getLogger(__name__)

MAX_READERS = 8
MAX_PAST = 2  # answers that are being made
MAX_DIGITS = 18  # of a time: 31 years
INTERVAL_S = 0.1
QUIET_S = 1.0  # a message comes at least so often
SEND_TIMEOUT_S = 30.0
COST_WINDOW = 100  # measurements
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
encode = msgspec.json.Encoder().encode


def time_of(values: list[str]) -> int:
    """The time that the query gives as `before_ns`, in ns; raises RequestError."""
    value = values[0] if len(values) == 1 else ""
    if value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS:
        return int(value)
    given = echo(value) if len(values) == 1 else f"given {len(values)} times"
    message = f"before_ns is {given}; it must be one time of the stream in ns, of at most {MAX_DIGITS} digits"
    raise RequestError(message, param="before_ns", code="invalid_value")


class LiveStreams:
    """The streams that are open over one server; while there are none, nothing is kept for them. Asyncio thread
    only.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._live: LiveState | None = None
        self._num_readers = 0
        self._num_past = 0
        self._strangers: WeakValueDictionary[str, Strangers] = WeakValueDictionary()
        self._costs: deque[tuple[int, int]] = deque([(0, time.process_time_ns())], COST_WINDOW)
        self._cost_ns = 0
        self._started_ns = time.monotonic_ns()

    def open(self, viewer: Viewer) -> LiveStream:
        """A stream for one reader; raises Loading, Draining, EngineDead, or Overloaded where too many read."""
        self._state.check_open()
        if self._num_readers >= MAX_READERS:
            raise Overloaded(
                f"{MAX_READERS} readers watch already, and more are not served; close one, or try again later",
                retry_after_s=10,
                code="too_many_readers",
            )
        return LiveStream(self, viewer)

    @contextmanager
    def reader(self, viewer: Viewer) -> Iterator[tuple[LiveState, LiveReader]]:
        """Count a reader in as long as it reads; the first has the last minute made ready, the last takes it along."""
        if self._live is None:
            self._live = self._follow()
        self._num_readers += 1
        strangers = self._strangers_of(viewer)
        server = self._server() | {"sees": "all" if viewer.sees_all else "own"}
        try:
            yield (
                self._live,
                LiveReader(
                    self._live,
                    name_of=viewer.name_of,
                    sees_all=viewer.sees_all,
                    server=server,
                    strangers=strangers,
                ),
            )
        finally:
            self._num_readers -= 1
            if self._num_readers == 0:
                self._live = None

    async def past(self, viewer: Viewer, before_ns: int) -> bytes:
        """What the stream told before that time, as JSON; made in turns, so that others are served in between. Raises
        what `open` raises.
        """
        self._state.check_open()
        if self._num_past >= MAX_PAST:
            message = f"{MAX_PAST} stretches of the past are being made; try again in a second"
            raise Overloaded(message, retry_after_s=1, code="too_many_readers")
        self._num_past += 1
        try:
            with self.work():
                since_ns = time.monotonic_ns() - PAST_NS
                past = LivePast(self._state.history, before_ns=before_ns, since_ns=since_ns)
            has_more = True
            while has_more:
                await asyncio.sleep(0)
                with self.work():
                    has_more = past.go_on()
            with self.work():
                return encode(past.message(Teller(self._strangers_of(viewer), sees_all=viewer.sees_all)))
        finally:
            self._num_past -= 1

    def _strangers_of(self, viewer: Viewer) -> Strangers:
        """Those of all readers with the same key, so that a stranger has one id in the stream and in the past."""
        strangers = self._strangers.get(viewer.owner)
        if strangers is None:
            strangers = self._strangers[viewer.owner] = Strangers(viewer.name_of)
        return strangers

    def _follow(self) -> LiveState:
        model = self._state.model
        return LiveState(
            self._state.history,
            now_ns=time.monotonic_ns(),
            since_ns=self._started_ns,
            num_slots=model.limits.max_num_seqs,
            num_blocks=model.num_blocks,
            ask_blocks=model.engine.ask_blocks,
            ask_line=self._state.ask_line,
        )

    def _server(self) -> dict[str, Any]:
        model = self._state.model
        return {
            "model": model.accepted.model_names[0],
            "version": __version__,
            **asdict(model.limits),
            "num_blocks": model.num_blocks,
            "can_send_test": self._state.is_loopback,
        }

    @property
    def end(self) -> str | None:
        """Why streams end now; None while they go on: a draining server is watched until its last request is done."""
        phase = self._state.phase
        if phase is Phase.FAILED:
            return "the engine has failed"
        if phase is Phase.DRAINING and (self._state.num_open == 0 or self._state.is_ending):
            return "the server is shutting down"
        return None

    @property
    def uptime_s(self) -> float:
        """Since the server began."""
        return round((time.monotonic_ns() - self._started_ns) / NS_PER_S, 1)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count the processor time of what is done inside as the cost of watching."""
        begin_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self._cost_ns += time.thread_time_ns() - begin_ns

    def cpu_share(self) -> float:
        """The share of the process's processor time that went into making messages lately."""
        self._costs.append((self._cost_ns, time.process_time_ns()))
        (own, all_ns), (own_then, all_then) = self._costs[-1], self._costs[0]
        return round((own - own_then) / max(all_ns - all_then, 1), 5)


class LiveStream:
    """An ASGI response: the messages of one reader until it leaves or the server ends.

    A reader that takes them slowly gets fewer of them; one that takes nothing for 30 s is left.
    """

    def __init__(self, streams: LiveStreams, viewer: Viewer) -> None:
        self._streams = streams
        self._viewer = viewer
        self._is_gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with self._streams.reader(self._viewer) as (live, reader):
                await self._stream(live, reader, send)
        except TimeoutError:
            logger.info("a reader of the live stream took nothing for %g s and was left", SEND_TIMEOUT_S)
            scope["abort"]()
            await self._is_gone.wait()
        finally:
            watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone.set()

    async def _stream(self, live: LiveState, reader: LiveReader, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        next_s = time.monotonic()
        while not self._is_gone.is_set():
            end = self._streams.end
            body, is_behind = self._message(live, reader, end, is_due=time.monotonic() >= next_s)
            if body:
                next_s = time.monotonic() + QUIET_S
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": body, "more_body": end is None})
            if end is not None:
                return
            await self._pause(0.0 if is_behind else INTERVAL_S)

    async def _pause(self, seconds: float) -> None:
        """Let others work; ends early when the reader leaves."""
        if seconds == 0.0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._is_gone.wait()
        except TimeoutError:
            pass

    def _message(self, live: LiveState, reader: LiveReader, end: str | None, *, is_due: bool) -> tuple[bytes, bool]:
        """The next event, empty if there is no news and none is due, and whether more is to be told at once."""
        streams = self._streams
        with streams.work():
            now_ns = time.monotonic_ns()
            is_behind = live.catch_up(now_ns)
            if not (reader.has_news or is_due or end):
                return b"", False
            message = reader.message(now_ns)
            message["uptime_s"] = streams.uptime_s
            message["cost"] = {"cpu_share": streams.cpu_share()}
            message["more"] = is_behind or reader.is_behind
            if end is not None:
                message["end"] = end
            return b"data: %b\n\n" % encode(message), message["more"]
