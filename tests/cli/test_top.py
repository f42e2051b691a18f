"""`everystop top` against a running server: one snapshot, the screen, and what it says when there is nothing to see."""

from __future__ import annotations

import contextlib
import http.server
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.cli import main
from everystop.cli.top_screen import time_of, uptime

ROOT = Path(__file__).parents[2]


def top(server: ParrotServer, *options: str) -> int:
    return main(["top", "--url", f"http://127.0.0.1:{server.port}", *options])


def test_a_snapshot_shows_who_runs_and_who_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    steps = threading.Semaphore(0)
    with parrot(max_num_seqs=2) as server:
        server.complete("ab")
        wait_until(lambda: server.engine._is_at_rest)  # it has let go of that request, which takes a plan of its own
        server.runner.before_step = lambda plan: steps.acquire(timeout=60) and None
        clients = [threading.Thread(target=server.complete, args=("abcdefgh",)) for _ in range(3)]
        try:
            for client in clients:
                client.start()
            engine, scheduler = server.engine, server.scheduler
            wait_until(lambda: len(engine._inbox) + len(scheduler.requests) == 3)
            num_steps = server.metric("steps_total")
            steps.release(2)  # the first may be planned before the others have come
            wait_until(lambda: server.metric("steps_total") == num_steps + 2)
            assert scheduler.num_running == 2
            assert top(server, "--once") == 0
        finally:
            steps.release(1000)
            for client in clients:
                client.join(60)
    text = capsys.readouterr().out
    assert "CONTINUOUS  parrot" in text
    for words in ("slots 2/2", "waiting 1", "no slot is free", "decisions", "8 of 8 prompt tokens", "prefill"):
        assert words in text, text
    assert "\x1b" not in text


def test_without_a_server_one_sentence_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("everystop: no server answers at http://127.0.0.1:9 (")
    assert "everystop serve" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://:80"])
def test_a_url_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url]) == 2
    assert "--url" in capsys.readouterr().err


def test_a_key_is_asked_for_and_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot(api_keys=("sk-ü",)) as server:
        assert top(server) == 1
        assert "wants a key: give it with --api-key or in EVERYSTOP_API_KEY" in capsys.readouterr().err
        assert top(server, "--api-key", "sk-no") == 1
        assert "wants another key" in capsys.readouterr().err
        assert top(server, "--api-key", "sk-ü") == 0
        monkeypatch.setenv("EVERYSTOP_API_KEY", "sk-ü, sk-2")
        assert top(server) == 0
        assert top(server, "--api-key", "a\nb") == 2


def test_requests_of_others_have_neither_names_nor_lengths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    texts: dict[str, str] = {}
    with (
        parrot(api_keys=("sk-a", "sk-b"), admin_keys=("sk-root",), max_num_seqs=1) as server,
        contextlib.ExitStack() as stack,
    ):
        server.runner.step_s = 0.005
        for key in ("sk-b", "sk-b", "sk-a"):
            stack.enter_context(server.held({"authorization": f"Bearer {key}"}))
        *others, own = (f"r{request_id}" for request_id in sorted(server.scheduler.requests.copy()))

        def is_told(key: str) -> bool:
            top(server, "--once", "--api-key", key)
            texts[key] = capsys.readouterr().out
            return own in texts[key] and "no slot is free" in texts[key]

        for key in ("sk-a", "sk-root"):
            wait_until(lambda key=key: is_told(key))
    told = texts["sk-a"]
    assert "your own requests; others without names" in told
    assert "behind another request, for which no slot is free" in told
    assert not [name for name in others if re.search(rf"\b{name}\b", told)]
    assert not re.search(r"another request +\d", told)
    assert all(name in texts["sk-root"] for name in others)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "hello"),
        (404, "hello"),
        (404, '{"error": {"message": "/ui/stream is not served here", "code": "not_found"}}'),
    ],
)
def test_another_kind_of_server_or_version_is_told_from_ours(
    status: int, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with other_server(status, body) as url:
        assert main(["top", "--url", url]) == 1
    assert "Everystop server" in capsys.readouterr().err


@contextlib.contextmanager
def other_server(status: int, body: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_the_screen_ends_cleanly(server_of_module: ParrotServer, key: bytes) -> None:
    screen, status = watch(server_of_module, key)
    assert status == 0, screen
    assert "Traceback" not in screen
    assert screen.count("\x1b[?1049h") == screen.count("\x1b[?1049l") == 1
    assert "CONTINUOUS" in screen


def test_the_end_of_the_server_is_told() -> None:
    with parrot() as server:
        screen, status = watch(server, b"", server.stop)
    assert status == 0, screen
    assert f"http://127.0.0.1:{server.port}: the server is shutting down" in screen


@pytest.fixture(scope="module")
def server_of_module() -> Iterator[ParrotServer]:
    with parrot() as server:
        yield server


def watch(server: ParrotServer, key: bytes, act: Callable[[], None] = lambda: None) -> tuple[str, int]:
    """Run `top` on a pseudo-terminal, press a key and act once it has drawn; its output and exit status."""
    parent, child = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        "LINES": "30",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, "-m", "everystop", "top", "--url", f"http://127.0.0.1:{server.port}"]
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
    )
    os.close(child)
    output, has_pressed, end_s = b"", False, time.monotonic() + 60
    with contextlib.suppress(OSError):  # the other end is closed
        while time.monotonic() < end_s:
            if select.select([parent], [], [], 0.1)[0]:
                chunk = os.read(parent, 65536)
                if not chunk:
                    break
                output += chunk
            if b"decisions" in output and not has_pressed:
                has_pressed = True
                if key == b"\x03":
                    process.send_signal(2)  # what the terminal makes of Ctrl-C
                elif key:
                    os.write(parent, key)
                act()
    os.close(parent)
    return output.decode(errors="replace"), process.wait(60)


def test_durations_are_written_as_in_explanations() -> None:
    assert [time_of(ns) for ns in (None, 1_230_000, 45_600_000, 130_000_000_000)] == [
        "–",
        "1.2 ms",
        "46 ms",
        "2 min 10 s",
    ]
    assert [uptime(s) for s in (2.3, 130, 20_000, 400_000)] == ["2.3 s", "2 min 10 s", "5 h 33 min", "111 h 6 min"]
