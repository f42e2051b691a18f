"""Live, ready, and what is kept when work does not get done."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until
from tests.server.test_lifecycle import Stream

from everystop.core.policy import PolicySettings, make_policy
from everystop.engine.loop import Turn
from everystop.server.crash_file import CrashFiles

NEVER_S = 600.0
OK = (200, b'{"status":"ok"}')
STUCK = (503, b'{"status":"stuck"}')


def states(server: ParrotServer) -> dict[str, tuple[int, str]]:
    paths = {"live": "/health/live", "ready": "/health/ready", "health": "/health"}
    answers = {name: server.get(path) for name, path in paths.items()}
    return {name: (status, json.loads(body)["status"]) for name, (status, body) in answers.items()}


def crash_lines(folder: Path, reason: str) -> list[Any]:
    """Of the first crash file with this reason; a machine that stands still may have left others."""
    return [json.loads(line) for line in crash_files(folder, reason)[0].read_text().splitlines()]


def crash_files(folder: Path, reason: str) -> list[Path]:
    """Those with this reason, in the order in which they were written."""
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [path for path in paths if f'"{reason}"' in path.read_text().partition("\n")[0]]


def has_crashed(folder: Path, reason: str) -> bool:
    return bool(crash_files(folder, reason))


def test_loading_is_alive_and_not_ready() -> None:
    with parrot(hold_loading=True) as server:
        wait_until(lambda: server.get("/health/live")[0] == 200)
        assert states(server) == {"live": (200, "loading"), "ready": (503, "loading"), "health": (503, "loading")}
        server.load_gate.set()
        wait_until(lambda: server.get("/health/ready") == OK)
        assert states(server) == dict.fromkeys(("live", "ready", "health"), (200, "ok"))


def test_loading_for_longer_than_a_stall_is_no_stall(tmp_path: Path) -> None:
    with parrot(hold_loading=True, stall_timeout=2.0, crash_files=CrashFiles(tmp_path, 5, {})) as server:
        server.let_tick(12)
        assert states(server)["live"] == (200, "loading")
        wait_until(lambda: server.service.state.stall_clock.loop_silent_s < 2.0)
    assert not has_crashed(tmp_path, "engine_stalled")


def test_health_says_one_word_and_needs_no_key() -> None:
    with parrot(api_keys=("k",)) as server:
        for path in ("/health", "/health/live", "/health/ready"):
            status, headers, body = server.request("GET", path)
            assert (status, body) == OK
            assert "x-request-id" not in headers
        for path in ("/health/", "/health/other", "/healthy", "/health/live/x", "//health/live"):
            assert server.get(path)[0] == 401, path


@pytest.fixture
def quick_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystop.server.stall_clock.LATE_S", 0.05)


@pytest.mark.usefixtures("quick_to_notice")
def test_a_stalled_step_ends_ready_first_and_live_later_and_all_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = CrashFiles(tmp_path / "new", 5, {"port": 8000})
    with parrot(stall_timeout=NEVER_S, crash_files=files) as server:
        server.runner.step_s = 0.002
        stream = Stream(server, ignore_eos=True, prompt="a private prompt")
        assert stream.started.wait(60)
        gate = threading.Event()
        server.runner.before_step = lambda plan: (gate.wait(60), None)[1]
        wait_until(lambda: server.get("/health/ready") == STUCK)
        assert server.get("/health/live") == OK
        server.service.state.stall_clock.timeout_s = 0.5
        wait_until(lambda: server.get("/health/live") == STUCK)
        assert stream.events()[-2]["error"]["code"] == "engine_failed"
        wait_until(lambda: has_crashed(tmp_path / "new", "engine_stalled"))
        server.let_tick(8)  # the watchdog looks again, and writes no second file of one stall
        num_files = len(crash_files(tmp_path / "new", "engine_stalled"))
        assert num_files <= 1 + caplog.text.count("the engine goes on"), "as it does once nobody could get on"
        server.service.state.stall_clock.timeout_s = NEVER_S
        server.runner.before_step = lambda plan: None
        gate.set()
        wait_until(lambda: server.get("/health/live") == server.get("/health/ready") == OK)
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
    lines = crash_lines(tmp_path / "new", "engine_stalled")
    assert lines[1] == {"settings": {"port": 8000}}
    engines = [one["frames"] for one in lines[2]["stacks"] if one["thread"] == "everystop-engine"]
    assert any("parrot.py" in frame and frame.endswith(" execute") for frames in engines for frame in frames)
    assert any(line[0] == "step" for line in lines[5:])
    assert [line[1]["num_prompt_tokens"] for line in lines[5:] if line[0] == "arrival"] == [len("a private prompt")]
    assert "private" not in json.dumps(lines)


@pytest.mark.usefixtures("quick_to_notice")
def test_an_idle_server_is_never_stuck() -> None:
    with parrot(stall_timeout=NEVER_S) as server:
        assert server.complete("a")[0] == 200
        wait_until(lambda: server.engine._is_at_rest)
        server.service.state.stall_clock.timeout_s = 0.4
        time.sleep(0.6)
        assert states(server) == dict.fromkeys(("live", "ready", "health"), (200, "ok"))


@pytest.mark.usefixtures("quick_to_notice")
def test_waiting_for_a_batch_to_fill_is_no_stall() -> None:
    policy = make_policy("static", PolicySettings(batch_wait_ns=60_000_000_000))
    with parrot(stall_timeout=NEVER_S, policy=policy) as server, server.held():
        wait_until(lambda: server.engine._wake_at_ns > 0)
        server.service.state.stall_clock.timeout_s = 0.4
        time.sleep(0.6)
        assert states(server)["live"] == states(server)["ready"] == (200, "ok")


@pytest.mark.usefixtures("quick_to_notice")
def test_work_that_no_step_computes_is_a_stall_though_the_thread_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that plans nothing while requests wait: the thread turns at each new request, in vain."""
    with parrot(stall_timeout=1.0) as server:
        monkeypatch.setattr(server.engine._loop, "turn", lambda: Turn([]))
        streams: list[Stream] = []
        with server.held():

            def is_stuck() -> bool:
                streams.append(Stream(server))  # which wakes the thread
                streams[-1].join(0.1)
                return server.get("/health/live") == STUCK

            wait_until(is_stuck)
            assert server.engine._thread.is_alive()
            for stream in streams:
                stream.join(60)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, MemoryError])
def test_whatever_ends_the_engines_thread_is_told(error: type[BaseException], tmp_path: Path) -> None:
    def fail(plan: object) -> None:
        raise error("a private thing")

    with parrot(crash_files=CrashFiles(tmp_path, 5, {})) as server:
        server.runner.step_s = 0.002
        stream = Stream(server, ignore_eos=True)
        assert stream.started.wait(60)
        server.runner.before_step = fail
        assert stream.events()[-2]["error"]["code"] == "engine_failed"
        assert states(server) == dict.fromkeys(("live", "ready", "health"), (503, "failed"))
        wait_until(lambda: has_crashed(tmp_path, "engine_failed"))
    lines = crash_lines(tmp_path, "engine_failed")
    assert lines[0]["error"].startswith(error.__name__)
    assert any("parrot" in frame or "test_health" in frame for frame in lines[0]["error_stack"])


def test_a_crash_file_that_cannot_be_written_hurts_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    with parrot(stall_timeout=1.0, crash_files=CrashFiles(tmp_path / "file", 5, {})) as server:
        gate = threading.Event()
        server.runner.before_step = lambda plan: (gate.wait(60), None)[1]
        assert server.complete("ab")[0] == 503
        wait_until(lambda: "no crash file could be written" in caplog.text)
        server.service.state.stall_clock.timeout_s = NEVER_S
        server.runner.before_step = lambda plan: None
        gate.set()
        wait_until(lambda: server.get("/health/live") == OK)
        assert server.complete("ab")[0] == 200


def test_an_event_loop_that_stands_still_is_kept_too(tmp_path: Path) -> None:
    with parrot(stall_timeout=1.0, crash_files=CrashFiles(tmp_path, 5, {})) as server:
        gate = threading.Event()
        server.loop.call_soon_threadsafe(gate.wait, 60)
        wait_until(lambda: has_crashed(tmp_path, "event_loop_stalled"))
        gate.set()
        wait_until(lambda: server.get("/health/live") == OK)
