"""What the server is doing: loading, ready, draining or failed; who may come in, and what `/health` says."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from everystop.core.durations import NS_PER_S
from everystop.core.errors import Draining, EngineDead
from everystop.core.events import Event
from everystop.engine.messages import StepOutput
from everystop.model.messages import PLAIN, ChatOptions
from everystop.observe.history import Client, History
from everystop.observe.metrics import Metrics
from everystop.observe.recorder import Recorder
from everystop.server.board import Board, EngineLike
from everystop.server.errors import Loading
from everystop.server.http_counts import HttpCounts
from everystop.server.protocol import Accepted
from everystop.server.queue import QueueAccount, QueueLimits
from everystop.server.request_log import Refusal
from everystop.server.stall_clock import StallClock
from everystop.server.texts import Texts

logger = logging.getLogger(__name__)

LOADING = "the model is being loaded; try again in a moment"
LINE_EVERY_NS = NS_PER_S // 4
LINE_WAIT_NS = NS_PER_S // 10
LINE_POLL_S = 0.005
MAX_IN_LINE = 1024
ENGINE_FAILED = "the engine has failed; the server must be restarted"


class ServedEngine(EngineLike, Protocol):
    """The engine as the server sees it; see `engine.engine.Engine`."""

    on_outputs: Callable[[list[StepOutput]], None]
    on_events: Callable[[list[Any]], None]
    on_failure: Callable[[BaseException], None]
    error: BaseException | None

    def start(self) -> None:
        """Start the engine's thread."""

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the engine's thread."""

    def ask_blocks(self) -> None:
        """Have a `BlockEvent` among the next events."""

    def ask_line(self, num: int) -> None:
        """Have a `LineEvent` of the first `num` who wait among them."""

    def stalled_ns(self, now_ns: int) -> int:
        """How long there has been work and no step has come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What bounds a step, as those who watch are told; names as in `Config`."""

    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


class Encode(Protocol):
    """Turns a raw text prompt into token ids; any thread may call it."""

    def __call__(self, text: str, *, add_special: bool = True) -> Sequence[int]:
        """The ids, with what the model's tokenizer puts around a text or without; raises RequestError."""


class EncodeChat(Protocol):
    """Turns validated messages into token ids; any thread may call it."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> Sequence[int]:
        """The ids of what the chat template writes; raises RequestError."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """All that a loader hands over: a model that can be asked.

    `fingerprint` names what determines an answer: version, model, arithmetic, instruction set. `num_blocks` is the size
    of the KV cache; `queue` bounds what may wait for a place to run. `tenant_names` are those that metrics tell apart.
    `recorder` writes the run down, and is told of each HTTP request once its answer is done. `is_chat_slow` tells that
    `encode_chat` takes long even for little.
    """

    engine: ServedEngine
    texts: Texts
    accepted: Accepted
    encode: Encode
    encode_chat: EncodeChat
    limits: EngineLimits
    num_blocks: int
    queue: QueueLimits
    fingerprint: str | None = None
    tenant_names: tuple[str, ...] = ()
    recorder: Recorder | None = None
    is_chat_slow: Callable[[], bool] = lambda: False

    @property
    def limit_tokens(self) -> int:
        """The longest sequence, prompt and answer, that the empty server holds."""
        return min(self.accepted.max_model_len, self.num_blocks * self.limits.block_size)


class Phase(StrEnum):
    """The life of a server."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ServerState:
    """The one mutable state of the HTTP side; asyncio thread only. `on_done` hears of each request that is answered,
    and `on_refused` of those that were turned away at the edge.

    With a `history` requests are remembered in it, and without one not at all. `is_counted` makes `metrics`, which grow
    with each request unless events are handed over and counted. `is_ending` tells that nobody is waited for any more,
    `is_loopback` that only this machine can reach the server. No request may take longer than `max_request_s`.
    """

    def __init__(
        self, history: History | None = None, stall_timeout_s: float = math.inf, *, is_counted: bool = True
    ) -> None:
        self.is_ending = False
        self.is_loopback = False
        self.stall_clock = StallClock(stall_timeout_s)
        self.max_request_s: float | None = None
        self.phase = Phase.LOADING
        self.error: BaseException | None = None
        self.num_open = 0
        self.created = int(time.time())
        self._model: ServedModel | None = None
        self._board: Board | None = None
        self._metrics: Metrics | None = None
        self._line_asked_ns = 0
        self._is_counted = is_counted
        self._is_remembered = history is not None
        self.history = history or History(num_finished=0)
        self.on_done: list[Callable[[Client], None]] = []
        self.on_refused: list[Callable[[Refusal], None]] = []
        self.http = HttpCounts()
        self.trace_headers: frozenset[bytes] = frozenset()  # by which a caller's trace goes on; none: not traced

    def open(self, model: ServedModel) -> None:
        """The model is there."""
        self._model = model
        self.stall_clock.engine = model.engine
        if model.recorder is not None:
            self.on_done.append(model.recorder.client)
        self._board = Board(model.engine, model.texts, QueueAccount(model.queue, model.limits.max_num_seqs))
        if self._is_counted:
            self._metrics = Metrics(
                model.num_blocks,
                model.tenant_names,
                block_size=model.limits.block_size,
                num_slots=model.limits.max_num_seqs,
                max_model_len=model.accepted.max_model_len,
            )
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    @property
    def model(self) -> ServedModel:
        """The served model; raises Loading before there is one."""
        if self._model is None:
            raise Loading(LOADING)
        return self._model

    @property
    def board(self) -> Board:
        """The board of running generations; raises Loading."""
        if self._board is None:
            raise Loading(LOADING)
        return self._board

    @property
    def metrics(self) -> Metrics | None:
        """The view of the engine's events, once there is an engine."""
        return self._metrics

    def receive(self, events: list[Event]) -> None:
        """Hand the events of a turn over to those who show them; called on the engine's thread."""
        if self._metrics is not None:
            self._metrics.receive(events)
        if self._board is not None:
            self._board.queue.receive(events)
        self.history.receive(events)

    def came(self, client: Client) -> None:
        """An HTTP request has just been submitted, in this turn of the event loop."""
        if self._is_remembered:
            self.history.add_client(client)
        if self._metrics is not None:
            self._metrics.came(client)

    def done(self, client: Client) -> None:
        """It has been answered, or its client has left."""
        for tell in self.on_done:
            try:
                tell(client)
            except Exception:
                logger.exception("the end of a request could not be noted; serving goes on")

    def refused(self, refusal: Refusal) -> None:
        """A request has been turned away before it was one."""
        for tell in self.on_refused:
            try:
                tell(refusal)
            except Exception:
                logger.exception("a refusal could not be noted; serving goes on")

    def ask_line(self) -> None:
        """Have the engine say soon who boards in which order, unless it has just been asked."""
        now_ns = time.monotonic_ns()
        if now_ns - self._line_asked_ns >= LINE_EVERY_NS:
            self._line_asked_ns = now_ns
            self.model.engine.ask_line(MAX_IN_LINE)

    async def see_line(self) -> None:
        """Know who boards in which order as of a moment ago, unless the engine takes longer to say it."""
        if self._model is None or not self.history.queue.ids:
            return
        now_ns = time.monotonic_ns()
        self.ask_line()
        while (line := self.history.queue.line) is None or line.now_ns < now_ns - LINE_EVERY_NS:
            if time.monotonic_ns() > now_ns + LINE_WAIT_NS:
                return
            await asyncio.sleep(LINE_POLL_S)
            self.history.catch_up()

    def check_open(self) -> None:
        """Raise what keeps new requests out: Draining, EngineDead, Loading."""
        if self.phase is Phase.DRAINING:
            raise Draining("the server is shutting down; send the request to another one, or later")
        if self.phase is Phase.FAILED:
            raise EngineDead(ENGINE_FAILED)
        if self.phase is Phase.LOADING:
            raise Loading(LOADING)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Counts a request that was let in until its answer is written."""
        self.check_open()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def health(self) -> tuple[int, str]:
        """HTTP status and word: whether requests should be sent here now."""
        if self.phase is not Phase.READY:
            return 503, self.phase.value
        if self.stall_clock.is_engine_late:
            return 503, "stuck"
        return 200, "ok"

    def live(self) -> tuple[int, str]:
        """HTTP status and word: whether this process gets on, or must be replaced; may be called from any thread."""
        if self.phase is Phase.FAILED:
            return 503, self.phase.value
        if self.stall_clock.is_engine_stalled:
            return 503, "stuck"
        return 200, "ok" if self.phase is Phase.READY else self.phase.value
