"""Watches from a thread of its own whether work gets done, and keeps what is known when it does not.

It only looks and writes: nothing that it does, or fails to do, touches a request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from everystop.core.durations import NS_PER_S
from everystop.server.crash_file import Crash, CrashFiles, Snapshot
from everystop.server.logs import exception_fields
from everystop.server.state import Phase, ServerState

logger = logging.getLogger("everystop.watchdog")

SNAPSHOT_S = 2.0
LAST_WORDS_S = 10.0


class Watchdog:
    """Writes a crash file when the engine fails, when no step comes back in time, or when the event loop stands still.

    `when_live` is called about once a second while all is well. Without `files` it only says what it sees.
    """

    def __init__(
        self, state: ServerState, files: CrashFiles | None, *, when_live: Callable[[], None] = lambda: None
    ) -> None:
        self._state = state
        self._files = files
        self._when_live = when_live
        self._clock = state.stall_clock
        self._started_ns = time.monotonic_ns()
        self._failure: BaseException | None = None
        self._stalled_since_ns = 0
        self._is_loop_stalled = False
        self._is_stopping = False
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="everystop-watchdog", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch."""
        self._loop = loop
        self._clock.turn()
        self._thread.start()

    def engine_failed(self, error: BaseException) -> None:
        """Keep what is known of it, on the watchdog's thread."""
        self._failure = error
        self._wake.set()

    def stop(self) -> None:
        """Finish what is being written, as far as that takes no more than 10 s."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(LAST_WORDS_S)

    # On the watchdog's thread.

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(self._clock.beat_s)
            self._wake.clear()
            self._clock.beat()
            self._try_to_look()
        self._try_to_look()  # at a failure that came while it looked

    def _try_to_look(self) -> None:
        try:
            self._look()
        except Exception:
            logger.exception("the watchdog could not look; serving goes on")

    def _look(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            fields = exception_fields(failure, trusts=False)
            message = "the engine's thread has ended"
            self._keep(Crash("engine_failed", message, fields["error"], tuple(fields["stack"])))
        if self._is_stopping:
            return
        self._look_at_engine()
        self._look_at_loop()
        if self._state.live()[0] == 200 and not self._is_loop_stalled:
            self._when_live()

    def _look_at_engine(self) -> None:
        if self._state.phase is Phase.FAILED:
            return
        is_stalled, silent_s, now_ns = self._clock.is_engine_stalled, self._clock.engine_silent_s, time.monotonic_ns()
        if is_stalled and not self._stalled_since_ns:
            self._stalled_since_ns = now_ns - round(silent_s * NS_PER_S)
            self._keep(Crash("engine_stalled", f"there is work, and for {silent_s:.1f} s no step has come back"))
        elif not is_stalled and self._stalled_since_ns:
            logger.warning("the engine goes on, %.1f s after it stalled", (now_ns - self._stalled_since_ns) / NS_PER_S)
            self._stalled_since_ns = 0

    def _look_at_loop(self) -> None:
        is_stalled, silent_s = self._clock.is_loop_stalled, self._clock.loop_silent_s
        if is_stalled and not self._is_loop_stalled:
            self._keep(Crash("event_loop_stalled", f"for {silent_s:.1f} s no request could be taken or answered"))
        elif self._is_loop_stalled and not is_stalled:
            logger.warning("the event loop goes on")
        self._is_loop_stalled = is_stalled

    def _keep(self, crash: Crash) -> None:
        """Write a crash file; where that cannot be done, say so and no more."""
        logger.error("%s", crash.message)
        if self._files is None:
            return
        try:
            path = self._files.write(crash, self._snapshot(), self._facts())
        except Exception as error:
            told = error.strerror or error if isinstance(error, OSError) else type(error).__name__
            logger.error("no crash file could be written to %s: %s", self._files.folder, told)
        else:
            if path is not None:
                logger.error("the last five minutes of events and all stacks are kept in %s", path)

    def _snapshot(self) -> Snapshot:
        """Taken by the event loop, whose the history is; where that does not answer, by us while it stands still."""
        taken: concurrent.futures.Future[Snapshot] = concurrent.futures.Future()

        def take() -> None:
            try:
                self._state.history.catch_up()
                taken.set_result(Snapshot.of(self._state.history, time.monotonic_ns()))
            except Exception as error:
                taken.set_exception(error)

        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(take)
            return taken.result(SNAPSHOT_S)
        except (TimeoutError, RuntimeError):  # it stands still, or has ended
            with contextlib.suppress(Exception):
                return Snapshot.of(self._state.history, time.monotonic_ns())
            return Snapshot()

    def _facts(self) -> dict[str, Any]:
        state = self._state
        return {
            "phase": state.phase.value,
            "open_http_requests": state.num_open,
            "silent_s": round(self._clock.engine_silent_s, 1),
            "uptime_s": round((time.monotonic_ns() - self._started_ns) / NS_PER_S, 1),
        }
