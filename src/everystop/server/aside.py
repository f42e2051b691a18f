"""Work beside generation, such as tokenizing a long text for its own sake: it has one thread of its own, a bounded line
before it, and memory of its own, so that no flood of it delays a generation, or keeps one out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Scope

from everystop.server.bodies import MAX_BODY_BYTES, Bodies
from everystop.server.errors import ClientGone, Overloaded

MAX_JOBS = 8  # that wait or are worked on
MAX_BODIES_BYTES = 2 * MAX_BODY_BYTES
RETRY_AFTER_S = 1
T = TypeVar("T")


async def run_in(thread: Executor, job: Callable[[], T]) -> T:
    """Do it in a thread; a StopIteration that escapes comes as RuntimeError, for a future takes none, and whoever waits
    for it would wait for ever (before Python 3.12).
    """

    def guarded() -> T:
        try:
            return job()
        except StopIteration as error:
            raise RuntimeError("an iteration ended in a job that has none") from error

    return await asyncio.get_running_loop().run_in_executor(thread, guarded)


class Aside:
    """The line and its thread; asyncio thread only. `bodies` counts what is received for it."""

    def __init__(self) -> None:
        self.bodies = Bodies(MAX_BODIES_BYTES)
        self._thread = ThreadPoolExecutor(1, "everystop-aside")
        self._turn = asyncio.Lock()
        self._num_jobs = 0

    @property
    def num_jobs(self) -> int:
        """How many wait or are worked on."""
        return self._num_jobs

    def check(self) -> None:
        """Raise Overloaded where all places are taken."""
        if self._num_jobs >= MAX_JOBS:
            raise Overloaded(
                f"{MAX_JOBS} large requests that generate nothing are being worked on, and no more are taken; try "
                f"again in {RETRY_AFTER_S} s",
                retry_after_s=RETRY_AFTER_S,
                code="aside_full",
            )

    @contextmanager
    def _place(self) -> Iterator[None]:
        self.check()
        self._num_jobs += 1
        try:
            yield
        finally:
            self._num_jobs -= 1

    async def run(self, scope: Scope, job: Callable[[], T]) -> T:
        """Do it in the thread when its turn comes; raises Overloaded where too many wait, and ClientGone if nobody
        waits for it by then.
        """
        with self._place():
            return await self._in_turn(scope, job)

    async def _in_turn(self, scope: Scope, job: Callable[[], T]) -> T:
        async with self._turn:
            if "has_left" in scope and scope["has_left"]():
                raise ClientGone
            return await run_in(self._thread, job)
