"""Starting, loading, draining, overload."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
from tests.measuring import least
from tests.server.parrot import DEADLINE_S, ParrotServer, parrot, parse_events, wait_until

from everystop.config import Config
from everystop.core.errors import ConfigError, ModelFileDamaged
from everystop.server.app import serve
from everystop.server.listener import listen
from everystop.server.service import Service
from everystop.server.state import ServedModel

COMPLETIONS = "/v1/completions"


class Stream(threading.Thread):
    """A streamed request in a thread of its own."""

    def __init__(self, server: ParrotServer, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._connection = server.connect()
        self._body = {"prompt": "abcdefgh", "stream": True, **fields}
        self.status = 0
        self.body = b""
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        self._connection.request("POST", COMPLETIONS, json.dumps(self._body))
        answer = self._connection.getresponse()
        self.status = answer.status
        self.started.set()
        self.body = answer.read()
        self._connection.close()

    def events(self) -> list[Any]:
        self.join(60)
        assert self.status == 200
        return parse_events(self.body)


def test_a_taken_port_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="is taken"):
        listen("127.0.0.1", other.getsockname()[1])


def test_two_servers_cannot_have_one_port() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="is taken"):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match="choose another --host"):
        listen(host, 0)


def test_while_loading_health_and_requests_get_503() -> None:
    with parrot(hold_loading=True) as server:
        wait_until(lambda: server.get("/health") == (503, b'{"status":"loading"}'))
        status, headers, body = server.request("POST", COMPLETIONS, {"prompt": "a"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "loading"
        assert server.get("/v1/models")[0] == 503
        assert b"\neverystop_ready 0.0\n" in server.get("/metrics")[1]
        server.load_gate.set()
        wait_until(lambda: server.get("/health")[0] == 200)
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        models = json.loads(server.get("/v1/models")[1])
        assert [model["id"] for model in models["data"]] == ["parrot", "alias"]
        assert server.get("/v1/models/parrot")[0] == 200
        assert server.get("/v1/models/other")[0] == 404


def test_a_signal_while_loading_ends_at_once() -> None:
    with parrot(hold_loading=True) as server:
        wait_until(lambda: server.get("/health")[0] == 503)
        server.stop()
        assert server.join() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_an_interrupt_while_loading_is_told_from_a_stop(number: int, code: int) -> None:
    ended = threading.Event()

    def load() -> ServedModel:
        os.kill(os.getpid(), number)
        ended.wait(DEADLINE_S)
        raise ModelFileDamaged("nobody waits for this")

    try:
        assert asyncio.run(Service(listen("127.0.0.1", 0), load, Config(), say=lambda line: None).run()) == code
    finally:
        ended.set()


def test_a_model_that_cannot_be_loaded_ends_the_service() -> None:
    def load() -> ServedModel:
        raise ModelFileDamaged("weights.gguf is truncated")

    sock = listen("127.0.0.1", 0)
    with pytest.raises(ModelFileDamaged, match="truncated"):
        asyncio.run(Service(sock, load, Config(), say=lambda line: None).run())


def test_drain_finishes_what_was_accepted() -> None:
    """3 running, 3 queued; new ones are refused, the listener stays open, all six end whole, exit 0."""
    with parrot(max_num_seqs=3) as server:
        gate = threading.Event()
        server.runner.before_step = lambda plan: (gate.wait(60), None)[1] if plan.rows else None
        streams = [Stream(server, ignore_eos=True, max_tokens=40) for _ in range(6)]
        wait_until(lambda: server.service.state.num_open == 6)
        server.stop()
        wait_until(lambda: server.get("/health") == (503, b'{"status":"draining"}'))
        status, headers, body = server.request("POST", COMPLETIONS, {"prompt": "a"})
        gate.set()
        assert status == 503
        assert int(headers["retry-after"]) > 0
        assert json.loads(body)["error"]["code"] == "draining"
        for stream in streams:
            events = stream.events()
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            assert len(events) == 40 + 2
        assert server.join() == 0
        assert server.num_free_blocks == server.num_blocks


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_cannot_finish_gets_an_error_event(how: str) -> None:
    with parrot(max_num_seqs=2, shutdown_timeout=0.3 if how == "timeout" else 60) as server:
        server.runner.step_s = 0.005
        streams = [Stream(server, ignore_eos=True) for _ in range(4)]
        wait_until(lambda: server.metric("num_requests_running") == 2 and server.metric("num_requests_waiting") == 2)
        wait_until(lambda: sum(stream.started.is_set() for stream in streams) == 2)
        server.stop()
        if how == "second signal":
            wait_until(lambda: server.get("/health")[0] == 503)
            server.stop()
        assert server.join() == 0
        for stream in streams:
            stream.join(60)
        running = [stream for stream in streams if stream.status == 200]
        assert len(running) == 2
        for stream in running:
            events = stream.events()
            assert events[-2]["error"]["code"] == "draining"
            assert events[-1] == "[DONE]"
        for stream in set(streams) - set(running):
            assert stream.status == 503
            assert json.loads(stream.body)["error"]["code"] == "draining"


def test_a_full_queue_refuses_and_recovers() -> None:
    with parrot(max_num_seqs=2, max_num_queued_reqs=8) as server:
        server.runner.step_s = 0.01
        streams = [Stream(server, ignore_eos=True, max_tokens=900, n=2) for _ in range(5)]
        wait_until(lambda: server.service.state.board.num_sequences == 10)
        wait_until(lambda: server.metric("num_requests_running") == 2)
        gate = threading.Event()
        server.runner.before_step = lambda plan: (gate.wait(60), None)[1]
        for _ in range(300):
            status, headers, body = server.request("POST", COMPLETIONS, {"prompt": "a"})
            assert status == 429
            assert int(headers["retry-after"]) > 0
        assert json.loads(body)["error"]["code"] == "queue_full"
        assert server.service.state.board.num_sequences == 10
        server.runner.step_s = 0
        gate.set()
        for stream in streams:
            assert stream.events()[-1] == "[DONE]"
        assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def test_a_request_for_more_than_the_queue_holds_leaves_no_trace() -> None:
    with parrot(max_num_seqs=1, max_num_queued_reqs=3) as server:
        status, body = server.complete(["a"] * 5)
        assert (status, body["error"]["code"]) == (400, "too_many_sequences")
        assert server.service.state.board.num_sequences == 0
        assert server.complete(["a"] * 4)[0] == 200


def test_idle_server_is_idle() -> None:
    with parrot() as server:
        server.complete("a")
        wait_until(lambda: server.engine._is_at_rest)
        steps = server.metric("steps_total")

        def idle_cpu_s() -> float:
            cpu_s = time.process_time()
            time.sleep(1)
            return time.process_time() - cpu_s

        used_s = least(idle_cpu_s, enough=0.2, tries=3)
        assert server.metric("steps_total") == steps
        assert used_s < 0.2, "a second of idling took that much CPU time"


def test_status_line_while_busy_only() -> None:
    with parrot(stats_interval=0.3) as server:
        server.runner.step_s = 0.002
        connection = server.connect()
        connection.request("POST", COMPLETIONS, b'{"prompt": "abc", "ignore_eos": true}')
        wait_until(lambda: any(line.startswith("running 1 ") for line in server.says))
        connection.close()
        wait_until(lambda: server.num_free_blocks == server.num_blocks)
        server.let_tick(4)
        said = len(server.says)
        server.let_tick(4)
        assert len(server.says) == said


def test_lines_that_cannot_be_written_stop_nothing() -> None:
    lines: list[object] = []

    def broken(line: object) -> None:
        lines.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    with parrot(stats_interval=0.2, say=broken, on_ready=broken) as server:
        server.runner.step_s = 0.002
        stream = Stream(server, ignore_eos=True)
        wait_until(lambda: len(lines) >= 3)  # the screen and two status lines
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        server.stop()
        server.stop()
        assert stream.events()[-1] == "[DONE]"
        assert server.join() == 0


def test_a_long_prompt_in_the_tokenizer_keeps_nobody_waiting() -> None:
    with parrot(num_blocks=2048, max_model_len=20_000) as server:
        gate = threading.Event()
        server.before_long_encode = lambda: (gate.wait(60), None)[1]
        stream = Stream(server, prompt="x" * 15_000, max_tokens=2)
        wait_until(lambda: server.service.state.num_open == 1)
        assert server.get("/health")[0] == 200
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        assert not stream.started.is_set()
        gate.set()
        assert stream.events()[-1] == "[DONE]"


def test_metrics_that_fail_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot() as server:

        def fail(*args: object) -> None:
            raise ValueError("a counter went backwards")

        monkeypatch.setattr("everystop.observe.metrics.Metrics._count", fail)
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        server.let_tick(2)
        assert server.get("/health")[0] == 200
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"


def test_a_fault_in_one_of_the_servers_own_affairs_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a number that is none")

    monkeypatch.setattr("everystop.server.service.StatusLine.next", fail)
    gate = threading.Event()
    with parrot(stats_interval=0.2, stall_timeout=600.0) as server:
        server.runner.step_s = 0.002
        stream = Stream(server, ignore_eos=True)
        assert stream.started.wait(60)
        wait_until(lambda: "own affairs" in caplog.text)
        server.let_tick(4)
        server.runner.before_step = lambda plan: (gate.wait(60), None)[1]
        server.service.state.stall_clock.timeout_s = 0.5
        assert stream.events()[-2]["error"]["code"] == "engine_failed", "those who wait in vain are ended all the same"
        server.service.state.stall_clock.timeout_s = 600.0
        gate.set()


def test_keep_alive_connections_serve_many_requests(server: ParrotServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for i in range(5):
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": f"no {i}", "stream": i % 2 == 1}))
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
    connection.close()


@pytest.mark.parametrize("key", ["", " ", "key ", "\tkey"])
def test_keys_that_no_client_could_send_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        serve(Config(port=0, api_key=("good", key)))
