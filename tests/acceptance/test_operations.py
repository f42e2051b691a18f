"""Acceptance cases of operations: an idle server is idle, a dead one says so, a full one refuses, and all recover."""

from __future__ import annotations

import contextlib
import gc
import http.client
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.measuring import least, rss_bytes
from tests.server.parrot import ParrotServer, parrot, parse_events, wait_until
from tests.server.test_model import ServerProcess

from everystop.core.events import Event, PreemptEvent
from everystop.core.plan import StepPlan
from everystop.core.policy import make_policy
from everystop.server.service import Service
from everystop.server.stall_clock import LATE_S, StallClock

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).parents[2]


# --------------------------------------------------------------------- 15: idleness


@pytest.mark.parametrize("idle_s", [1.5, pytest.param(10.0, marks=pytest.mark.slow)])
def test_ac_15_an_idle_server_is_idle_and_wakes_at_once(idle_s: float) -> None:
    with parrot() as server:
        server.complete("a")
        wait_until(lambda: server.engine._is_at_rest)
        gc.collect()
        num_steps = server.scheduler._next_step_id
        used_s = least(lambda: idle_cpu_s(idle_s), enough=0.02 * idle_s, tries=3)
        assert used_s < 0.02 * idle_s, f"{used_s:.3f} s of CPU time in {idle_s} s without work"
        assert server.scheduler._next_step_id == num_steps
        slept: list[float | None] = []
        watch_sleep(server, slept)

        def wake() -> float:
            wait_until(lambda: server.engine._is_at_rest)
            before = server.scheduler._next_step_id
            began_s = time.monotonic()
            server.complete("a", max_tokens=1)
            took_s = time.monotonic() - began_s
            assert server.scheduler._next_step_id > before
            return took_s

        waited_s = least(wake, enough=0.02, tries=100)
        assert waited_s < 0.02, f"served {waited_s:.3f} s after its arrival at best"
        assert set(slept) == {None}, "it looks for work from time to time, instead of being woken"


def idle_cpu_s(idle_s: float) -> float:
    """CPU time of this process while nobody asks for anything."""
    cpu_s = time.process_time()
    time.sleep(idle_s)
    return time.process_time() - cpu_s


def watch_sleep(server: ParrotServer, slept: list[float | None]) -> None:
    """Note how long the engine's thread wants to sleep at most, each time from now on."""

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            slept.append(timeout)
            return super().wait(timeout)

    before, server.engine._wake = server.engine._wake, Watched()
    before.set()
    wait_until(lambda: bool(slept))


# --------------------------------------------------------------------- 57: health


def check_ac_57(server: ParrotServer, how: str, deadline_s: float, stall_s: float = 600.0) -> None:
    """A streaming client and a queued one while the engine dies, or stands still, which is a stall after `stall_s`."""
    server.runner.step_s = 0.002
    gate = threading.Event()
    answers: list[Any] = []
    with server.held(stream=True) as streaming:
        stream = streaming.getresponse()
        assert stream.readline().startswith(b"data: ")
        waiter = threading.Thread(target=lambda: answers.append(server.complete("abc", ignore_eos=True)), daemon=True)
        waiter.start()
        wait_until(lambda: len(server.scheduler.requests) == 2)

        def strike(plan: StepPlan) -> None:
            if how == "killed":
                raise RuntimeError("the roof is on fire")
            gate.wait(60)

        server.runner.before_step = strike
        server.service.state.stall_clock.timeout_s = stall_s
        struck_s = time.monotonic()
        for path in ("/health", "/health/ready", "/health/live"):
            status = server.get(path)[0]
            while status == 200 and time.monotonic() - struck_s < deadline_s:
                time.sleep(0.02)
                status = server.get(path)[0]
            assert status == 503, f"{path} is {status} though the engine was {how}"
        assert b"[DONE]" in stream.read(), "the streaming client waits for ever"
        waiter.join(deadline_s)
        assert answers, "the queued client waits for ever"
        assert answers[0][0] == 503
        assert answers[0][1]["error"]["code"] == "engine_failed"
    server.runner.before_step = lambda plan: None
    gate.set()


@pytest.mark.parametrize("how", ["killed", "blocked"])
def test_ac_57_health_tells_of_a_dead_or_stuck_engine_within_five_seconds(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its own pace, ten times as fast: a busy machine may take longer, but no step more than the limit."""
    assert LATE_S <= 4.0, "with a second for whoever asks"
    monkeypatch.setattr("everystop.server.stall_clock.LATE_S", LATE_S / 10)
    with parrot(stall_timeout=600.0) as server:
        check_ac_57(server, how, deadline_s=60.0, stall_s=0.45)
        server.service.state.stall_clock.timeout_s = 600.0
        if how == "blocked":  # and once it gets on, all is well
            wait_until(lambda: server.get("/health")[0] == 200)
            assert server.complete("ab")[1]["choices"][0]["text"] == "ab"


def test_mutant_ac_57_healthy_as_long_as_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StallClock, "engine_silent_s", property(lambda clock: 0.0))
    monkeypatch.setattr("everystop.server.stall_clock.LATE_S", 0.3)
    with parrot() as server, pytest.raises(AssertionError, match="though the engine was blocked"):
        check_ac_57(server, "blocked", deadline_s=2.0, stall_s=1.0)


def test_mutant_ac_57_nobody_tells_the_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "_fail", lambda service, error: None)
    with parrot() as server, pytest.raises(AssertionError, match="though the engine was killed"):
        check_ac_57(server, "killed", deadline_s=1.0)


# --------------------------------------------------------------------- 58: the end


class Stoppable(Protocol):
    """A server that can be told to stop: in this process, or in its own."""

    port: int

    def get(self, path: str) -> tuple[int, bytes]: ...

    def metric(self, name: str) -> float: ...


class Stream(threading.Thread):
    """A streamed answer of `max_tokens`, read to its end."""

    def __init__(self, server: Stoppable, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._port = server.port
        self._body = {"prompt": "abcdefgh", "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
        self.status = 0
        self.retry_after = ""
        self.body = b""
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", COMPLETIONS, json.dumps(self._body))
            answer = connection.getresponse()
            self.status, self.retry_after = answer.status, answer.headers.get("retry-after", "")
            first = answer.readline()
            self.has_begun.set()
            self.body = first
            self.body += answer.read()


def three_and_three(server: Stoppable, max_tokens: int) -> list[Stream]:
    """Three that run, whose answers have begun, and three that wait."""
    streams = [Stream(server, max_tokens) for _ in range(6)]
    wait_until(lambda: server.metric("num_requests_running") == 3 and server.metric("num_requests_waiting") == 3)
    wait_until(lambda: sum(stream.has_begun.is_set() for stream in streams) == 3)
    return streams


def check_ac_58_first_signal(
    server: Stoppable, send_signal: Any, max_tokens: int, hold: Any = lambda: None, go_on: Any = lambda: None
) -> None:
    """Ready says no, newcomers are sent away, and all six are served to their end.

    The engine that can be told to `hold` stands still until the newcomer has its answer; another has enough to do.
    """
    streams = three_and_three(server, max_tokens)
    hold()
    send_signal()
    wait_until(lambda: server.get("/health")[0] == 503)
    assert server.get("/health/ready")[0] == 503
    assert server.get("/health/live")[0] == 200, "who still serves is to be left alone"
    newcomer = Stream(server, max_tokens=1)
    newcomer.join(60)
    go_on()
    assert newcomer.status == 503
    assert int(newcomer.retry_after) > 0
    assert b'"draining"' in newcomer.body
    for stream in streams:
        stream.join(60)
        assert stream.status == 200, "a request that had been accepted was turned away"
        assert stream.body.endswith(b"data: [DONE]\n\n"), "a stream was cut off"
        assert parse_events(stream.body)[-2]["choices"][0]["finish_reason"] == "length"


def check_ac_58_second_signal(server: Stoppable, send_signal: Any, *, is_sent: bool = True) -> None:
    """What runs ends with an error event, what waits with 503, at once; where no second one `is_sent`, when the
    server's own time for a drain is over.
    """
    streams = three_and_three(server, max_tokens=900)
    send_signal()
    if is_sent:
        wait_until(lambda: server.get("/health")[0] == 503)
        send_signal()
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive(), "a client hangs after the end"
        if stream.status == 200:
            events = parse_events(stream.body)
            assert events[-1] == "[DONE]"
            assert events[-2]["error"]["code"] == "draining"
        else:
            assert stream.status == 503
    assert sorted(stream.status for stream in streams) == [200, 200, 200, 503, 503, 503]


def test_ac_58_a_signal_drains_and_a_second_one_ends() -> None:
    with parrot(max_num_seqs=3) as server:
        server.runner.step_s = 0.01
        gate = threading.Event()

        def hold() -> None:
            server.runner.before_step = lambda plan: (gate.wait(60), None)[1]

        def go_on() -> None:
            server.runner.step_s = 0.0
            gate.set()

        check_ac_58_first_signal(server, server.stop, 900, hold, go_on)
        assert server.join() == 0
    with parrot(max_num_seqs=3) as server:
        server.runner.step_s = 0.01
        check_ac_58_second_signal(server, server.stop)
        assert server.join() == 0
    with parrot(max_num_seqs=3, shutdown_timeout=0.3) as server:
        server.runner.step_s = 0.01
        check_ac_58_second_signal(server, server.stop, is_sent=False)
        assert server.join() == 0


@pytest.mark.model
def test_ac_58_on_the_embedded_model() -> None:
    """With real signals to a process of its own."""
    checks = (partial(check_ac_58_first_signal, max_tokens=450), check_ac_58_second_signal)
    for check in checks:
        flags = ("--max-num-seqs", "3", "--max-model-len", "1024", "--shutdown-timeout", "600")
        with ServerProcess(*flags) as server:
            check(server, lambda server=server: server.process.send_signal(signal.SIGTERM))
            assert server.process.wait(60) == 0


def test_mutant_ac_58_the_drain_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drain(service: Service) -> None:
        service.state.phase = type(service.state.phase)("draining")

    monkeypatch.setattr(Service, "_drain", drain)
    with parrot(max_num_seqs=3) as server:
        server.runner.step_s = 0.01
        with pytest.raises((AssertionError, OSError)):
            check_ac_58_first_signal(server, server.stop, 900)


# --------------------------------------------------------------------- 59: overload

CAP, MAX_NUM_SEQS = 100, 16


@contextlib.contextmanager
def full_queue(server: ParrotServer) -> Iterator[None]:
    """As many requests as the server takes, and none of them ends."""
    server.runner.step_s = 0.3
    body = json.dumps({"prompt": "abc", "ignore_eos": True, "max_tokens": 900})
    with contextlib.ExitStack() as stack:
        for _ in range(2 * CAP):
            connection = stack.enter_context(contextlib.closing(server.connect()))
            connection.request("POST", COMPLETIONS, body)
        wait_until(lambda: len(server.scheduler.requests) >= CAP + MAX_NUM_SEQS)
        yield


def check_ac_59(server: ParrotServer, num_requests: int, timeout_s: float) -> None:
    """One answer in a hundred may take long: nobody can say who else uses the machine."""
    body = json.dumps({"prompt": "abc"})
    took_s, statuses = [list[float]() for _ in range(4)], [set[int]() for _ in range(4)]

    def flood(worker: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
        with contextlib.closing(connection):
            for _ in range(num_requests // 4):
                began_s = time.monotonic()
                try:
                    connection.request("POST", COMPLETIONS, body)
                    answer = connection.getresponse()
                    answer.read()
                except (OSError, http.client.HTTPException):
                    statuses[worker].add(-1)
                    return
                took_s[worker].append(time.monotonic() - began_s)
                has_advice = int(answer.headers.get("retry-after", "0")) > 0
                statuses[worker].add(answer.status if has_advice else 0)

    def grown_bytes() -> float:
        gc.collect()
        before = rss_bytes()
        threads = [threading.Thread(target=flood, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        return rss_bytes() - before

    with full_queue(server):
        grown = least(grown_bytes, enough=8 << 20, tries=3)
        assert set().union(*statuses) <= {429, 503}, f"answers beside 429 and 503: {set().union(*statuses)}"
        assert len(server.scheduler.requests) <= CAP + MAX_NUM_SEQS
        assert grown < 8 << 20, f"{grown:,} bytes more after {num_requests:,} refusals"
        assert sorted(itertools.chain(*took_s))[-num_requests // 100] < 2.0
    server.runner.step_s = 0.0
    wait_until(lambda: not server.scheduler.requests and server.service.state.num_open == 0)
    assert server.service.state.board.num_sequences == 0
    assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def test_ac_59_ten_thousand_requests_at_a_full_queue_are_refused_and_all_recovers() -> None:
    with parrot(max_num_queued_reqs=CAP, max_num_seqs=MAX_NUM_SEQS) as server:
        check_ac_59(server, num_requests=10_000, timeout_s=20.0)


def test_mutant_ac_59_a_queue_without_end() -> None:
    with parrot(max_num_queued_reqs=10**9) as server, pytest.raises(AssertionError, match="answers beside 429 and 503"):
        check_ac_59(server, num_requests=40, timeout_s=0.5)


# --------------------------------------------------------------------- 60: metrics


def counters(server: ParrotServer) -> dict[str, float]:
    """Every sample of a counter."""
    lines = server.get("/metrics")[1].decode().splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith(" counter")}
    found = {}
    for line in lines:
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0].removesuffix("_total") in {name.removesuffix("_total") for name in names}:
            found[sample] = float(value)
    assert any("generation_tokens" in name for name in found)
    return found


def test_ac_60_a_failing_hook_kills_nothing_and_the_numbers_are_right() -> None:
    """The hook throws while clients leave and others are preempted; afterwards no gauge stands, no counter fell."""
    with parrot(policy=make_policy("priority"), max_num_seqs=1, has_priorities=True) as server:
        preempted: list[Event] = []
        receive = server.engine.on_events
        num_thrown = 0

        def throw(events: list[Event]) -> None:
            nonlocal num_thrown
            receive(events)
            preempted.extend(event for event in events if isinstance(event, PreemptEvent))
            num_thrown += 1
            raise ValueError("a counter went backwards")

        server.engine.on_events = throw
        seen = [counters(server)]
        server.runner.step_s = 0.002
        with server.held(stream=True, priority=5), server.held(priority=5):
            assert server.complete("ab", priority=0)[1]["choices"][0]["text"] == "ab"
            seen.append(counters(server))
        wait_until(lambda: not server.scheduler.requests)
        assert preempted
        assert num_thrown > 3
        wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("request_success_total", 'finished_reason="abort"') == 2
        seen.append(counters(server))
        for before, after in pairwise(seen):
            fallen = {name: (value, after.get(name)) for name, value in before.items() if after.get(name, -1) < value}
            assert not fallen
        assert server.get("/health")[0] == 200
        assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


# --------------------------------------------------------------------- 63: a port that is taken


def test_ac_63_a_taken_port_is_found_before_anything_is_loaded() -> None:
    """Not even the modules that would load something are there. The time is that of the CPU: the clock says more of a
    machine that is busy.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-X", "importtime", "-m", "everystop", "serve", "no-such-model.gguf", "--port", port]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

        def end_s() -> float:
            before_s = cpu_of_children_s()
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
            used_s = cpu_of_children_s() - before_s
            assert done.returncode == 2
            assert f"port {port}" in done.stderr
            assert "no-such-model" not in done.stderr
            lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
            imported = {line.rpartition("|")[2].strip() for line in lines}
            assert "everystop.config" in imported
            assert not imported & {"numpy", "uvicorn", "tokenizers", "everystop._native"}, (
                "that takes longer than a second"
            )
            assert re.search(r"--port", done.stderr), "what to change"
            return used_s

        assert least(end_s, enough=1.0, tries=5) < 1.0


def cpu_of_children_s() -> float:
    """CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
