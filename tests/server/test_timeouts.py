"""How long a request may live: its own timeout and the server's."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.server.deadline import Deadline
from everystop.server.errors import TimedOut

COMPLETIONS = "/v1/completions"
S = 10**9


def ask(server: ParrotServer, **fields: Any) -> tuple[int, Any]:
    server.runner.step_s = 0.005
    return server.complete("abc", ignore_eos=True, max_tokens=900, **fields)


def is_released(server: ParrotServer) -> bool:
    return not server.scheduler.requests and server.num_free_blocks == server.num_blocks


def test_a_request_ends_at_its_own_timeout() -> None:
    with parrot() as server:
        began_s = time.monotonic()
        status, body = ask(server, timeout=0.2)
        assert time.monotonic() - began_s >= 0.198  # the loop's clock has whole milliseconds
        assert (status, body["error"]["type"], body["error"]["code"]) == (504, "timeout_error", "request_timeout")
        assert "within 0.2 s (its own timeout)" in body["error"]["message"]
        wait_until(lambda: is_released(server))
        assert server.service.state.board.aborted == {"TimedOut": 1}
        wait_until(lambda: server.metric("request_success_total", "abort") == 1)


def test_a_request_ends_at_the_servers_limit_whatever_it_asks_for() -> None:
    with parrot(max_request_seconds=0.2) as server:
        for timeout in ({}, {"timeout": 60}):
            status, body = ask(server, **timeout)
            assert status == 504
            assert "within 0.2 s (--max-request-seconds)" in body["error"]["message"]
        status, body = ask(server, timeout=0.05)
        assert "within 0.05 s (its own timeout)" in body["error"]["message"]
        wait_until(lambda: is_released(server))


def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    with parrot() as server:
        server.runner.step_s = 0.01
        body = {"prompt": "abc", "ignore_eos": True, "max_tokens": 900, "timeout": 4, "n": 2}
        *events, error, done = server.events(COMPLETIONS, body)
        assert done == "[DONE]"
        assert error["error"]["code"] == "request_timeout"
        assert {event["choices"][0]["index"] for event in events} == {0, 1}
        wait_until(lambda: is_released(server))
        assert server.service.state.board.aborted == {"TimedOut": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_time_in_the_queue_counts(stream: bool) -> None:
    with parrot(max_num_seqs=1) as server:
        server.runner.step_s = 0.005
        with server.held():
            status, body = server.complete("abc", timeout=0.1, stream=stream)
            assert (status, body["error"]["code"]) == (504, "request_timeout")
            wait_until(lambda: len(server.scheduler.requests) == 1)
            wait_until(lambda: server.service.state.board.queue.num_reqs == 0)


def test_time_in_the_tokenizer_counts() -> None:
    gate = threading.Event()
    with parrot(num_blocks=2048, max_model_len=20_000) as server:
        server.before_long_encode = lambda: (gate.wait(0.2), None)[1]
        status, body = server.complete("x" * 15_000, max_tokens=1, timeout=0.1)
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        assert server.engine._next_id == 0, "what nobody waits for any more was submitted"


def test_an_answer_in_time_is_an_answer() -> None:
    with parrot(max_request_seconds=30.0) as server:
        for stream in (False, True):
            assert server.request("POST", COMPLETIONS, {"prompt": "abc", "timeout": 10, "stream": stream})[0] == 200
        assert not server.service.state.board.aborted


@pytest.mark.parametrize("timeout", [0, -1, "1", True, 100_000])
def test_a_timeout_that_cannot_be_is_refused_by_name(server: ParrotServer, timeout: Any) -> None:
    status, body = server.complete("a", timeout=timeout)
    assert (status, body["error"]["param"]) == (400, "timeout")
    assert server.complete("a", timeout=None)[0] == 200


def test_the_lesser_of_two_limits_holds() -> None:
    assert Deadline.of(5 * S, None, None) is None
    assert Deadline.of(5 * S, 2.0, None) == (7 * S, 2.0, True)
    assert Deadline.of(5 * S, 2.0, 2.0) == (7 * S, 2.0, True)
    assert Deadline.of(5 * S, 3.0, 2.0) == (7 * S, 2.0, False)
    assert Deadline.of(5 * S, None, 2.0) == (7 * S, 2.0, False)
    past, future = Deadline(0, 1.0, is_own=True), Deadline(2**62, 1.0, is_own=True)
    assert past.left_s() == 0.0
    assert future.left_s() > 0
    future.check()
    with pytest.raises(TimedOut, match="within 1 s"):
        past.check()
