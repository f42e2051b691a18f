"""How long an engine with work has not got on."""

from __future__ import annotations

import threading
import time

from tests.engine.test_engine import CountingRunner, running_engine, wait_until

from everystop.core.plan import StepPlan, StepResult
from everystop.engine.messages import Abort

MS = 1_000_000


def test_no_work_is_no_stall_and_new_work_begins_to_count_when_it_comes() -> None:
    gate = threading.Event()

    def hold(plan: StepPlan, result: StepResult) -> None:
        gate.wait(60)

    with running_engine(CountingRunner(hold)) as client:
        engine = client.engine
        wait_until(lambda: engine._is_at_rest)
        time.sleep(0.1)
        assert engine.stalled_ns(time.monotonic_ns()) == 0
        began_ns = time.monotonic_ns()
        client.submit()
        time.sleep(0.05)
        stalled_ns = engine.stalled_ns(time.monotonic_ns())
        assert 40 * MS <= stalled_ns <= time.monotonic_ns() - began_ns
        client.submit()
        assert engine.stalled_ns(time.monotonic_ns()) >= stalled_ns, "more work does not hide the stall"
        gate.set()
        client.collect(2)
        wait_until(lambda: engine.stalled_ns(time.monotonic_ns()) == 0)


def test_each_step_is_progress() -> None:
    """While a step stands still, the clock is no older than the end of the one before."""
    steps, num_begun = threading.Semaphore(0), 0

    def hold(plan: StepPlan, result: StepResult) -> None:
        nonlocal num_begun
        num_begun += 1
        assert steps.acquire(timeout=60)

    with running_engine(CountingRunner(hold)) as client:
        client.submit(max_tokens=10)
        for step in range(1, 10):
            wait_until(lambda step=step: num_begun == step)  # type: ignore[misc]
            released_ns = time.monotonic_ns()
            steps.release()
            wait_until(lambda step=step: num_begun == step + 1)  # type: ignore[misc]
            now_ns = time.monotonic_ns()
            assert client.engine.stalled_ns(now_ns) <= now_ns - released_ns
        steps.release()
        client.collect(1)


def test_waiting_for_a_time_that_the_policy_named_is_no_stall() -> None:
    with running_engine(CountingRunner(), policy="static", batch_wait_ns=60_000_000_000) as client:
        request_id = client.submit()
        wait_until(lambda: client.engine._wake_at_ns > 0 and client.engine._scheduler.num_waiting == 1)
        time.sleep(0.05)
        assert client.engine.stalled_ns(time.monotonic_ns()) == 0
        late_ns = client.engine.stalled_ns(time.monotonic_ns() + 61_000_000_000)
        assert 0 < late_ns < 60_000_000_000, "what is beyond that time counts, and the wait before it does not"
        client.engine.abort(Abort((request_id,)))
        wait_until(lambda: not client.engine._scheduler.requests)
        assert client.engine.stalled_ns(time.monotonic_ns() + 61_000_000_000) == 0


def test_an_error_that_is_no_exception_ends_the_engine_as_any_other() -> None:
    def leave(plan: StepPlan, result: StepResult) -> None:
        raise SystemExit(3)

    with running_engine(CountingRunner(leave)) as client:
        client.submit()
        assert isinstance(client.failures.get(timeout=60), SystemExit)
        assert isinstance(client.engine.error, SystemExit)
