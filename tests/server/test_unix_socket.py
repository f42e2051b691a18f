"""A server at a path: who may connect, what lies there before, and what stays behind."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, wait_until
from tests.server.parrot_process import ROOT

from everystop.core.errors import ConfigError
from everystop.server.listener import is_loopback, listen, listen_at_path, url_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def ask(path: str, method: str = "GET", target: str = "/health", body: Any = None) -> tuple[int, bytes]:
    connection = UnixConnection(path)
    connection.request(method, target, body)
    answer = connection.getresponse()
    told = answer.status, answer.read()
    connection.close()
    return told


def is_ready(path: str) -> bool:
    connection = UnixConnection(path)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:  # nobody listens yet
        return False
    finally:
        if connection.sock is not None:
            connection.sock.close()


def test_requests_and_streams_are_answered_at_a_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_at_path(path) as sock:
        monkeypatch.setattr("tests.server.parrot.listen", lambda *_: sock)
        server = ParrotServer()
        server._thread.start()
        wait_until(lambda: ask(path)[0] == 200)
        status, body = ask(path, "POST", "/v1/completions", b'{"prompt": "ab", "stream": true}')
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        assert b'"text":"a"' in body
        server.stop()
        assert server.join() == 0


def test_the_file_is_for_owner_and_group_and_goes_in_the_end(path: str) -> None:
    umask = os.umask(0)
    try:
        with listen_at_path(path) as sock:
            assert os.stat(path).st_mode & 0o777 == 0o660
            assert is_loopback(sock)
            assert url_of(sock, "127.0.0.1") == f"unix:{path}"
        assert not os.path.exists(path)
        assert os.umask(0) == 0, "given back"
    finally:
        os.umask(umask)


def test_what_a_dead_server_left_is_replaced(path: str) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(path)
    left.close()
    with listen_at_path(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)


def test_a_path_that_another_server_serves_is_left_alone(path: str) -> None:
    with listen_at_path(path):
        with pytest.raises(ConfigError, match="is served by a running server"), listen_at_path(path):
            pass
        assert os.path.exists(path)


def test_a_file_that_is_no_socket_is_left_alone(path: str) -> None:
    Path(path).write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"), listen_at_path(path):
        pass
    assert Path(path).read_text() == "mine"


@pytest.mark.parametrize("bad", ["no/such/folder/s", "x" * 200])
def test_paths_where_nothing_can_be_made_are_named(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="choose another --uds"), listen_at_path(str(tmp_path / bad)):
        pass


def test_a_socket_that_somebody_put_in_its_place_stays(path: str) -> None:
    with listen_at_path(path):
        os.unlink(path)
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        other.bind(path)
    assert os.path.exists(path)
    other.close()


def test_urls_of_ports() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(sock, "::1", scheme="https") == f"https://[::1]:{port}"


@pytest.mark.model
def test_the_command_serves_the_model_at_a_path_and_removes_it(path: str) -> None:
    command = [sys.executable, "-m", "everystop", "serve", "--uds", path, "--served-model-name", "a"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [*command, "--served-model-name", "b", "--log-format", "json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: is_ready(path), 120)
        assert ask(path, target="/v1/models")[1].count(b'"id":') == 2
        for name in (b'"a"', b'"b"'):
            request = b'{"prompt": "Hi", "max_tokens": 1, "model": %b}' % name
            assert ask(path, "POST", "/v1/completions", request)[0] == 200
        assert b'"model":"a"' in ask(path, "POST", "/v1/completions", b'{"prompt": "Hi", "max_tokens": 1}')[1]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert not os.path.exists(path)
    assert out == "", "one log, in one format"
    assert f'"url": "unix:{path}"' in err
