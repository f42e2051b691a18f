"""How long a request would have taken otherwise, worked out from the record of the run so far.

That simulates the traffic of all, so only who sees all may ask. A process of its own does it, at the lowest priority,
one at a time: it shares neither the interpreter nor the memory of the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.types import Scope

from everystop.core.errors import Draining, RequestError
from everystop.observe.history import Client
from everystop.observe.recorder import Recorder
from everystop.server.aside import run_in
from everystop.server.errors import ClientGone, EstimateTooSlow, Forbidden, NoEstimate, Overloaded
from everystop.server.state import Phase, ServerState
from everystop.server.visibility import Caller

logger = logging.getLogger(__name__)

PARAMETER = "what_if"
LIMIT_S = 60.0
FLUSH_S = 5.0
POLL_S = 0.1
RETRY_AFTER_S = 5
MAX_BYTES = 2 << 30  # of memory, for what is read of the record
NICE = 19
OOM_SCORE = "1000"  # where memory runs out, the system ends this process before any other
COMMAND = (sys.executable, "-P", "-m", "everystop", "explain", "--what-if", "--json")
PREFIX = "everystop: "


def is_asked_for(values: Sequence[str]) -> bool:
    """Whether `what_if`, given with these values, asks for estimates; raises RequestError."""
    if len(values) > 1 or (values and values[0] not in ("true", "false")):
        raise RequestError(f"{PARAMETER} must be true or false, once", param=PARAMETER, code="invalid_value")
    return list(values) == ["true"]


class Estimates:
    """Makes estimates for one server; asyncio thread only."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._thread = ThreadPoolExecutor(1, "everystop-estimate")
        self._is_busy = False

    def refusal(self, caller: Caller) -> RequestError | None:
        """Why that caller gets none, whatever the request; None if that is no reason."""
        if not caller.sees_all:
            return Forbidden(
                "estimates simulate the requests of all, so they need a key of --admin-key; or ask whoever has the "
                "record: everystop explain ID --record FILE --what-if",
                code="admin_key_needed",
            )
        recorder = self._state.model.recorder
        if recorder is None:
            why = "this server keeps no record, from which estimates are made; start it with --record FILE"
        elif not recorder.path.is_file():
            why = "the record of this server is no file that could be read; start it with --record FILE"
        elif not recorder.is_open:
            why = "the record of this server has ended early, as the log says; make room and start the server again"
        else:
            return None
        return NoEstimate(why, code="not_recorded")

    async def explain(self, scope: Scope, caller: Caller, find: Callable[[], Client]) -> bytes:
        """The explanation of a request with estimates, in JSON, as `everystop explain --what-if --json` prints it.

        Raises what `find` raises, Forbidden, NoEstimate, Overloaded, EstimateTooSlow, Draining, and ClientGone where
        nobody waits any more.
        """
        refusal = self.refusal(caller)
        if refusal is not None:
            raise refusal
        client = find()
        if client.delivered_ns is None:
            raise NoEstimate("the request is not over, so there is nothing to compare an estimate with; ask again then")
        if self._is_busy:
            raise Overloaded(
                f"another estimate is being made, one at a time; try again in {RETRY_AFTER_S} s",
                retry_after_s=RETRY_AFTER_S,
                code="estimate_running",
            )
        recorder = self._state.model.recorder
        assert recorder is not None
        self._is_busy = True
        try:
            job = _Job(recorder, client.name, scope.get("has_left", lambda: False), lambda: self._is_ending)
            return await run_in(self._thread, job.run)
        finally:
            self._is_busy = False

    @property
    def _is_ending(self) -> bool:
        return self._state.is_ending or self._state.phase is Phase.DRAINING


class _Job:
    """One estimate; `run` is done in a thread."""

    def __init__(
        self, recorder: Recorder, name: str, has_left: Callable[[], bool], is_ending: Callable[[], bool]
    ) -> None:
        self._recorder = recorder
        self._path = recorder.path.absolute()
        self._name = name
        self._has_left = has_left
        self._is_ending = is_ending
        self._end_s = time.monotonic() + LIMIT_S

    def run(self) -> bytes:
        """The JSON that the process prints; raises what is wrong."""
        if not self._recorder.flush(FLUSH_S):
            raise NoEstimate("the record could not be brought up to date; ask again", code="not_recorded")
        command = (*COMMAND, f"--record={self._path}", "--", self._name)
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            _humble(process.pid)
            try:
                out, err = self._wait(process)
            finally:
                process.kill()  # of no effect on one that has ended
        if process.returncode == 0:
            return out
        raise NoEstimate(self._words(process.returncode, err.decode(errors="replace")))

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """What it prints, on both streams; raises why nobody waits for it any more."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=POLL_S)
            if self._has_left():
                raise ClientGone
            if self._is_ending():
                raise Draining("the server is shutting down, so no estimate is made; ask the record when it has ended")
            if time.monotonic() >= self._end_s:
                raise EstimateTooSlow(
                    f"the record is too long to be simulated within {LIMIT_S:g} s; take the time elsewhere: everystop "
                    f"explain {self._name} --record FILE --what-if"
                )

    def _words(self, code: int, said: str) -> str:
        """Its sentence, without the path of the record; what else it said goes to the log."""
        found = [line.removeprefix(PREFIX) for line in said.splitlines() if line.startswith(PREFIX)]
        if found:
            return found[-1].replace(str(self._path), "the record")
        if code < 0 or "MemoryError" in said:
            return "the process that makes the estimate was ended, as it is where memory runs out; record a shorter run"
        logger.error("the process that makes an estimate has failed (exit code %d): %s", code, said.strip())
        return "the process that makes the estimate has failed; the server's log has what it said"


def _humble(pid: int) -> None:
    """Have a process that has just begun take only what others leave."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)
    if hasattr(resource, "prlimit"):
        limits: Mapping[int, int] = {resource.RLIMIT_DATA: MAX_BYTES, resource.RLIMIT_CPU: round(LIMIT_S)}
        for kind, limit in limits.items():
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(pid, kind, (limit, limit))
