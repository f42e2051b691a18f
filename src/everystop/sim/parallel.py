"""Runs independent calls side by side in processes of their own; results come in the order of the calls, whoever was
faster.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TypeVar

from everystop.core.errors import ConfigError, EverystopError

T = TypeVar("T")
Progress = Callable[[int], None]  # how many calls have ended


class WorkerLost(EverystopError):
    """A process that simulated was ended from outside."""


class Workers:
    """At most `num_jobs` calls at once; with one job they run here, one after the other. A context manager: on an error
    what has not begun is dropped.

    Functions and arguments of the calls must be picklable.
    """

    def __init__(self, num_jobs: int) -> None:
        if num_jobs < 1:
            raise ConfigError(f"--jobs is {num_jobs}; it must be at least 1")
        self._pool: ProcessPoolExecutor | None = None
        if num_jobs > 1:
            # spawn: a fork of a process with threads, such as a progress bar's, may hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_jobs, context, initializer=_die_with_the_parent)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], progress: Progress) -> list[T]:
        """The function's result for each tuple of arguments; `progress` hears of each that has ended.

        Raises WorkerLost, and what the function raises.
        """
        if self._pool is None:
            results = []
            for arguments in calls:
                results.append(function(*arguments))
                progress(1)
            return results
        futures = [self._pool.submit(function, *arguments) for arguments in calls]
        try:
            for future in as_completed(futures):
                future.result()
                progress(1)
        except BrokenProcessPool:
            raise WorkerLost("a worker process was killed, perhaps for want of memory; lower --jobs") from None
        return [future.result() for future in futures]


def _die_with_the_parent() -> None:
    """An interrupt ends a worker at once, without a traceback of its own; so does what ends its parent, as a SIGTERM
    or SIGKILL, which nobody passes on: it would finish its call and wait for another for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_wait_for_the_end_of_the_parent, daemon=True).start()


def _wait_for_the_end_of_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
