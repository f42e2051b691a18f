"""Calls side by side: order, errors, and workers that die."""

from __future__ import annotations

import os
import signal

import pytest

from everystop.core.errors import ConfigError
from everystop.sim.parallel import WorkerLost, Workers


def ignore(num: int) -> None:
    pass


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_results_come_in_the_order_of_the_calls_and_errors_as_they_are(num_jobs: int) -> None:
    heard: list[int] = []
    with Workers(num_jobs) as workers:
        assert workers.run(divmod, [(i, 3) for i in range(7)], heard.append) == [divmod(i, 3) for i in range(7)]
        assert heard == [1] * 7
        with pytest.raises(ZeroDivisionError):
            workers.run(divmod, [(1, 1), (1, 0)], ignore)


def test_worker_that_is_killed_is_one_sentence() -> None:
    with Workers(2) as workers, pytest.raises(WorkerLost, match="lower --jobs"):
        workers.run(signal.raise_signal, [(signal.SIGKILL,)], ignore)


def test_workers_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="--jobs is 0"):
        Workers(0)


def test_one_job_runs_in_this_process() -> None:
    with Workers(1) as workers:
        assert workers.run(os.getpid, [()], ignore) == [os.getpid()]
