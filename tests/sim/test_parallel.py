"""Calls side by side: order, errors, and workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_whoever_started_them(sent: signal.Signals) -> None:
    """The pipe ends when the last process that holds it has gone."""
    code = (
        "from everystop.sim.parallel import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(2) as workers:\n"
        "        workers.run(max, [(1, 2)], lambda num: None)\n"
        "        print('idle', flush=True)\n"
        "        workers.run(exec, [('import time; time.sleep(60)',)], lambda num: None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "idle\n"
        parent.send_signal(sent)
        assert parent.stdout.read() == ""
    assert parent.returncode == -sent


def test_workers_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="--jobs is 0"):
        Workers(0)


def test_one_job_runs_in_this_process() -> None:
    with Workers(1) as workers:
        assert workers.run(os.getpid, [()], ignore) == [os.getpid()]
