"""The life of one server: listen, load, serve, drain, end; owns the order of things and the signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from everystop.config import Config
from everystop.core.errors import Draining, EngineDead
from everystop.keys import KeyHash
from everystop.observe.aftermath import COST_SHARE, MAX_SAVED_NS, TRACED_COST_SHARE, Aftermath
from everystop.observe.history import History
from everystop.observe.stats import StatusLine
from everystop.observe.thread_share import ThreadShare
from everystop.server.crash_file import CrashFiles
from everystop.server.http import HttpServer
from everystop.server.listener import is_loopback
from everystop.server.request_log import RequestLog, Write
from everystop.server.routes import make_app
from everystop.server.slow_log import SlowLog
from everystop.server.state import ENGINE_FAILED, Phase, ServedModel, ServerState
from everystop.server.supervisor import Supervisor
from everystop.server.tls import Certificate
from everystop.server.tracing import Tracer
from everystop.server.watchdog import Watchdog
from everystop.tenants import Tenants

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
TICK_S = 0.25
POLL_S = 0.02
LAST_WORDS_S = 2.0
INTERRUPTED = 128 + signal.SIGINT
T = TypeVar("T")


class Service:
    """Serves on a listening socket from the first moment; `load` runs in a thread and brings the model.

    `say` prints lines for the operator, and `log_request` the fields of a line about a request. `run` returns the exit
    code: 0 after a drain, 1 when the engine had failed, 130 after an interrupt (SIGINT) while loading.
    """

    def __init__(
        self,
        sock: socket.socket,
        load: Callable[[], ServedModel],
        config: Config,
        *,
        api_keys: Sequence[KeyHash | str] = (),
        admin_keys: Sequence[KeyHash | str] = (),
        tenants: Tenants | None = None,
        tls: Certificate | None = None,
        open_traces: Callable[[History], Tracer] | None = None,
        crash_files: CrashFiles | None = None,
        log_request: Write | None = None,
        on_ready: Callable[[ServedModel], None] = lambda model: None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        history = History(num_finished=config.explain_history)
        self.state = ServerState(history, config.stall_timeout)
        self.state.is_loopback = is_loopback(sock)
        self.state.max_request_s = config.max_request_seconds
        self._sock = sock
        self._load = load
        self._config = config
        app = make_app(self.state, api_keys, tenants, admin_keys=admin_keys, allowed_hosts=config.allowed_host)
        self._tls = tls
        self._http = HttpServer(app, app.turn_away, self.state.http.note_refused, None if tls is None else tls.context)
        self._on_ready = _unless_closed(on_ready)
        self._say = _unless_closed(say)
        share = ThreadShare(COST_SHARE if open_traces is None else TRACED_COST_SHARE, MAX_SAVED_NS)
        self._aftermath = Aftermath(history, share)
        self.state.on_done.append(self._aftermath.note)
        self._traces = None if open_traces is None else open_traces(history)
        self._slow_log = None if config.slow_log is None else SlowLog(history, config.slow_log, self._say)
        self._request_log = None if log_request is None else RequestLog(history, log_request)
        self._listen_to_ends()
        self._supervisor = Supervisor()
        self._watchdog = Watchdog(self.state, crash_files, when_live=lambda: self._supervisor.tell("WATCHDOG=1"))
        self._status: StatusLine | None = None
        self._next_line_s = 0.0
        self._signals = 0
        self._first_signal: int | None = None
        self._signalled: asyncio.Event

    def _listen_to_ends(self) -> None:
        """Have those told who say or export how requests went."""
        if self._traces is not None:
            self.state.trace_headers = self._traces.headers
            self._aftermath.on_life.append(self._traces.note)
        if self._slow_log is not None:
            self._aftermath.on_life.append(self._slow_log.note)
        if self._request_log is not None:
            self._aftermath.on_life.append(self._request_log.note)
            self.state.on_refused.append(self._request_log.refused)

    async def run(self) -> int:
        """Serve until a signal, or until loading fails, whose error is raised."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._signalled = asyncio.Event()
        self._handle_signals()
        self._watchdog.start(asyncio.get_running_loop())
        watching = None if self._tls is None else asyncio.create_task(self._tls.watch(self._say))
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        ticking = asyncio.create_task(self._tick())
        loading = self._start_loading()
        stopped = asyncio.create_task(self._signalled.wait())
        ends: set[asyncio.Future[Any]] = {loading, stopped, http}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is None:
            self._open(loading.result())
            await asyncio.wait(ends - {loading}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        failed = self.state.phase is Phase.FAILED
        ticking.cancel()
        self._look(is_last=True)
        await self._end(http)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        stopped.cancel()
        if watching is not None:
            watching.cancel()
        if loading.done():
            loading.result()
        if self.state.phase is Phase.LOADING and self._first_signal == signal.SIGINT:
            return INTERRUPTED
        return 1 if failed else 0

    def request_stop(self, number: int = signal.SIGTERM) -> None:
        """What a signal does: the first call drains, the second ends what still runs."""
        self._signals += 1
        self._first_signal = self._first_signal or number
        self._signalled.set()

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.request_stop, number)

    def _start_loading(self) -> asyncio.Future[ServedModel]:
        """Load in a daemon thread, so that a signal need not wait for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ServedModel] = loop.create_future()

        def settle(model: ServedModel | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if model is not None:
                future.set_result(model)
            else:
                future.set_exception(error or RuntimeError("the loader brought nothing"))

        def work() -> None:
            model, failure = None, None
            try:
                model = self._load()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, model, failure)

        threading.Thread(target=work, name="everystop-load", daemon=True).start()
        return future

    def _open(self, model: ServedModel) -> None:
        loop, state = asyncio.get_running_loop(), self.state
        state.open(model)
        board, metrics = state.board, state.metrics
        assert metrics is not None
        self._aftermath.on_life.append(lambda client, life: metrics.explained(life))
        model.engine.on_outputs = lambda outputs: _call(loop, board.deliver, outputs)
        model.engine.on_events = state.receive
        model.engine.on_failure = lambda error: _call(loop, self._fail, error)
        model.engine.start()
        gc.collect()
        gc.freeze()
        self._supervisor.tell("READY=1")
        self._on_ready(model)

    def _fail(self, error: BaseException) -> None:
        """The engine's thread has died: end everybody, then the process, or stay up with 503 until a restart."""
        self.state.error = error
        self.state.phase = Phase.FAILED
        ends = self._config.on_engine_failure == "exit"
        then = "the server ends" if ends else "/health answers 503 until a restart"
        self._say(f"the engine has failed ({type(error).__name__}: {error}): {then}")
        self._watchdog.engine_failed(error)
        self.state.board.fail_all(EngineDead(ENGINE_FAILED))
        if self.state.metrics is not None:
            self.state.metrics.forget_running()
        if ends:
            self._signalled.set()

    async def _tick(self) -> None:
        """Count events, print the status line, and end those who wait for an engine that does not get on, or for whom
        too much waits; a fault in one of these ends neither the others nor itself for good.
        """
        affairs: tuple[Callable[[], None], ...] = (
            self._look,
            self._end_the_stuck,
            self._http.cut_off_laggards,
            self._say_status,
        )
        failing: set[Callable[[], None]] = set()  # of which the log has been told
        while True:
            self.state.stall_clock.turn()
            for see_to_it in affairs:
                try:
                    see_to_it()
                    failing.discard(see_to_it)
                except Exception:
                    if see_to_it not in failing:
                        logger.exception("the server could not see to its own affairs; serving goes on")
                    failing.add(see_to_it)
            await asyncio.sleep(TICK_S)

    def _say_status(self) -> None:
        """The status line, where its time has come."""
        metrics, now_s, interval_s = self.state.metrics, time.monotonic(), self._config.stats_interval
        if metrics is None or interval_s <= 0:
            return
        if self._status is None:
            self._status, self._next_line_s = StatusLine(metrics, now_s), now_s + interval_s
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + interval_s
            line = self._status.next(now_s)
            if line is not None:
                self._say(line)

    def _end_the_stuck(self) -> None:
        clock = self.state.stall_clock
        if clock.is_engine_stalled:
            error = EngineDead(f"the engine has not finished a step for {clock.engine_silent_s:.0f} s")
            self.state.board.fail_all(error)

    def _look(self, *, is_last: bool = False) -> None:
        """Take in what has happened, and say what was slow, what is over and where its time went."""
        now_ns = time.monotonic_ns()
        try:
            if self.state.metrics is not None:
                self.state.metrics.catch_up()
            self.state.history.catch_up()
            self._aftermath.tick(now_ns, is_last=is_last)
            if self._slow_log is not None:
                self._slow_log.tick(now_ns)
            if self._request_log is not None:
                self._request_log.tick(now_ns, is_last=is_last)
        except Exception:
            logger.exception("events could not be counted; serving goes on")

    async def _drain(self) -> None:
        """Let what was accepted finish within the timeout, or until a second signal; the rest gets an error each."""
        state = self.state
        self._supervisor.tell("STOPPING=1")
        if state.phase is Phase.READY:
            state.phase = Phase.DRAINING
            self._say(f"draining; open requests: {state.num_open}, time to finish: {self._config.shutdown_timeout:g} s")
        timeout_s = self._config.shutdown_timeout if state.phase is Phase.DRAINING else LAST_WORDS_S
        deadline_s = time.monotonic() + timeout_s
        while state.num_open and self._signals < 2 and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        if not state.num_open or state.metrics is None:
            return
        why = f"--shutdown-timeout {timeout_s:g} s" if state.phase is Phase.DRAINING else "the failure of the engine"
        why = "a second signal" if self._signals >= 2 else why
        self._say(f"ending unfinished requests: {state.num_open}, because of {why}")
        state.board.fail_all(Draining("the server has shut down before the request was finished"))
        deadline_s = time.monotonic() + LAST_WORDS_S
        while state.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)

    async def _end(self, http: asyncio.Task[None]) -> None:
        self.state.is_ending = True
        await asyncio.to_thread(self._watchdog.stop)
        if self.state.metrics is not None:
            await asyncio.to_thread(self.state.model.engine.stop)
        self._http.should_exit = True
        await http


def _unless_closed(tell: Callable[[T], None]) -> Callable[[T], None]:
    """`tell`, whose closed pipe or full disk stops nothing."""

    def tell_or_not(news: T) -> None:
        with contextlib.suppress(OSError):
            tell(news)

    return tell_or_not


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    """Hand something over to the event loop, unless it has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)
