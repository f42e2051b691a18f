"""A full queue: who is refused, when, at what cost, and that it recovers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.server import prompts
from everystop.server.queue import QueueAccount
from everystop.server.service_rate import MAX_RETRY_AFTER_S

COMPLETIONS = "/v1/completions"


def queue_of(server: ParrotServer) -> QueueAccount:
    queue = server.service.state.board.queue
    assert isinstance(queue, QueueAccount)
    return queue


@contextlib.contextmanager
def crowd(server: ParrotServer, num: int, **fields: Any) -> Iterator[list[HTTPConnection]]:
    """So many requests that never end by themselves, each of which has reached the engine."""
    server.runner.step_s = 0.005
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.held(**fields)) for _ in range(num)]
    wait_until(lambda: not server.scheduler.requests)
    server.runner.step_s = 0


def refused(server: ParrotServer, body: Any = None) -> tuple[int, str]:
    """Retry-After and the message of a 429."""
    status, headers, answer = server.request("POST", COMPLETIONS, {"prompt": "a"} if body is None else body)
    error = json.loads(answer)["error"]
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full"), error
    return int(headers["retry-after"]), error["message"]


def test_a_full_queue_refuses_with_numbers_and_recovers() -> None:
    with parrot(max_num_seqs=2, max_num_queued_reqs=3) as server:
        with crowd(server, 5):
            wait_until(lambda: server.scheduler.num_waiting == 3)
            for _ in range(50):
                seconds, message = refused(server)
            assert 1 <= seconds <= MAX_RETRY_AFTER_S
            assert "waiting 3 of at most 3 requests (--max-num-queued-reqs)" in message
            assert "of at most 1,048,576 prompt tokens (--max-num-queued-tokens)" in message
            assert f"try again in {seconds} s" in message
            assert len(server.scheduler.requests) == 5
        assert server.complete("ok")[1]["choices"][0]["text"] == "ok"
        assert (queue_of(server).num_reqs, queue_of(server).num_tokens, queue_of(server).num_held) == (0, 0, 0)


def test_a_burst_into_an_idle_server_is_not_refused() -> None:
    """Twelve at once where one may wait: all of them have a place to run."""
    with parrot(max_num_seqs=12, max_num_queued_reqs=1) as server:
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            statuses = list(pool.map(lambda i: server.complete("ab" * i)[0], range(1, 13)))
        assert statuses == [200] * 12


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_choices_and_prompts_count_one_by_one(fields: dict[str, Any]) -> None:
    with parrot(max_num_seqs=1, max_num_queued_reqs=4) as server, crowd(server, 4):
        wait_until(lambda: server.scheduler.num_waiting == 3)
        _, message = refused(server, {"prompt": "a", "max_tokens": 1, **fields})
        assert "so 2 more" in message
        with server.held():
            assert queue_of(server).num_reqs == 4


@pytest.mark.parametrize("kind", ["completion", "chat", "tgi"])
def test_what_is_refused_is_neither_read_nor_rendered_nor_tokenised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot(max_num_seqs=1, max_num_queued_reqs=1) as server, crowd(server, 2):
        wait_until(lambda: server.scheduler.num_waiting == 1)

        def never(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("work was done for a request that is refused")

        model = server.service.state.model
        monkeypatch.setattr(prompts.json_body, "parse_json", never)
        object.__setattr__(model, "encode", never)
        object.__setattr__(model, "encode_chat", never)
        path, body = {
            "completion": (COMPLETIONS, {"prompt": "a" * 100}),
            "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 20_000}]}),
            "tgi": ("/generate", {"inputs": "a" * 100}),
        }[kind]
        status, headers, answer = server.request("POST", path, body)
        assert status == 429, answer
        assert int(headers["retry-after"]) >= 1
        if kind == "tgi":
            assert json.loads(answer)["error_type"] == "overloaded"


def test_a_refusal_does_not_wait_for_the_body() -> None:
    """Headers alone, of a body that never comes; the connection is of use afterwards where it does come."""
    with parrot(max_num_seqs=1, max_num_queued_reqs=1) as server, crowd(server, 2):
        wait_until(lambda: server.scheduler.num_waiting == 1)
        body = json.dumps({"prompt": "abc"}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            for _ in range(2):
                connection.sendall(head)
                answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429 ")
                connection.sendall(body)


def test_a_client_that_waits_to_send_its_body_is_refused_instead() -> None:
    body = json.dumps({"prompt": "abc"}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    with parrot(max_num_seqs=1, max_num_queued_reqs=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            for _ in range(2):
                connection.sendall(head.encode())
                assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
                connection.sendall(body)
                answer = connection.recv(65536)
                while not answer.endswith(b"}}"):
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200 ")
        with crowd(server, 2):
            wait_until(lambda: server.scheduler.num_waiting == 1)
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(head.encode())
                answer = b""
                while chunk := connection.recv(65536):
                    answer += chunk
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"connection: close\r\n" in answer


def test_more_choices_than_fit_are_refused_before_any_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot(max_num_seqs=1, max_num_queued_reqs=4) as server, crowd(server, 2):
        wait_until(lambda: server.scheduler.num_waiting == 1)
        encoded: list[str] = []
        model = server.service.state.model
        object.__setattr__(model, "encode", lambda text, **options: encoded.append(text) or list(text.encode()))
        refused(server, {"prompt": "a", "n": 4})
        assert not encoded
        assert server.complete("a", n=40)[1]["error"]["code"] == "too_many_sequences"
        assert not encoded


def test_tokens_that_wait_are_capped() -> None:
    with parrot(max_num_seqs=1, max_num_queued_tokens=500) as server, crowd(server, 3, prompt="a" * 200):
        wait_until(lambda: server.scheduler.num_waiting == 2)
        assert queue_of(server).num_tokens == 400
        _, message = refused(server, {"prompt": "a" * 150})
        assert "with 400 of at most 500 prompt tokens" in message
        with server.held(prompt="a" * 40):
            assert queue_of(server).num_tokens == 440


def test_a_prompt_that_never_fits_is_refused_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, by the pool and not by the context alone, and without the engine."""
    with parrot(num_blocks=4, max_model_len=512) as server:
        submitted: list[Any] = []
        monkeypatch.setattr(server.engine, "submit", submitted.append)
        status, body = server.complete("a" * 200)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
        assert re.search(r"\b200\b.*\b63\b.*\b64\b", body["error"]["message"])
        status, body = server.complete("a" * 60, max_tokens=5)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "max_tokens")
        assert re.search(r"\b60\b.*\b5\b.*\b65\b.*\b64\b.*\bto 4\b", body["error"]["message"])
        assert server.chat("a" * 200)[0] == 400
        assert not submitted


def test_room_comes_back_at_once_when_clients_leave_though_the_engine_is_busy() -> None:
    gate, is_busy = threading.Event(), threading.Event()
    with parrot(max_num_seqs=1, max_num_queued_reqs=2) as server, contextlib.ExitStack() as stack:
        server.runner.step_s = 0.005  # else the first one may have reached its last token by now
        clients = [stack.enter_context(server.held()) for _ in range(3)]
        wait_until(lambda: server.scheduler.num_waiting == 2)
        server.runner.before_step = lambda plan: (is_busy.set(), gate.wait(60), None)[2]
        assert is_busy.wait(60)
        refused(server)
        clients[2].close()
        wait_until(lambda: queue_of(server).num_reqs == 1)
        assert len(server.scheduler.requests) == 3, "the engine has not even heard of it"
        waiting = concurrent.futures.ThreadPoolExecutor(1).submit(server.complete, "ok")
        wait_until(lambda: queue_of(server).num_reqs == 2)
        clients[0].close()
        clients[1].close()
        gate.set()
        assert waiting.result(60)[1]["choices"][0]["text"] == "ok"


def test_clients_that_left_before_they_boarded_are_never_computed() -> None:
    admitted: set[int] = set()
    with parrot(max_num_seqs=1) as server:
        server.runner.step_s = 0.002
        server.runner.before_step = lambda plan: admitted.update(each.request_id for each in plan.admitted)
        with server.held():
            for stream in (False, True):
                with server.held(stream=stream):
                    pass
                wait_until(lambda: len(server.scheduler.requests) == 1)
        wait_until(lambda: not server.scheduler.requests)
        assert admitted == {0}


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_an_iteration_that_ends_in_a_thread_costs_an_error_and_no_place(path: str) -> None:
    """A future takes no StopIteration: whoever waited for one waited for ever, and kept its place in the queue."""

    def end() -> None:
        next(iter(()))

    with parrot(num_blocks=2048, max_model_len=20_000) as server:
        server.before_long_encode = end
        for _ in range(3):
            assert server.post(path, {"prompt": "a" * 15_000})[0] == 500
        assert queue_of(server).num_reqs == 0
        assert server.complete("ok")[0] == 200
        wait_until(lambda: server.service.state.num_open == 0)


def test_a_client_that_leaves_while_its_prompt_is_tokenised_is_never_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    with parrot(num_blocks=2048, max_model_len=20_000) as server:
        server.before_long_encode = lambda: (gate.wait(60), None)[1]
        submitted: list[Any] = []
        submit = server.engine.submit
        monkeypatch.setattr(server.engine, "submit", lambda message: (submitted.append(message), submit(message))[1])
        with contextlib.closing(server.connect()) as connection:
            connection.request("POST", COMPLETIONS, json.dumps({"prompt": "a" * 15_000}))
            wait_until(lambda: queue_of(server).num_reqs == 1)
        wait_until(lambda: not server.service._http.server_state.connections)
        gate.set()
        wait_until(lambda: server.service.state.num_open == 0)
        assert not submitted
        assert (queue_of(server).num_reqs, queue_of(server).num_tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(2))
def test_the_count_never_drifts_whoever_comes_and_goes(seed: int) -> None:
    """Clients that finish, leave in every state, are refused or send nonsense; in the end nothing is left counted."""
    dice = random.Random(seed)
    plans = [
        (dice.random() < 0.5, dice.randrange(1, 4), dice.randrange(1, 60), dice.random() * 0.03, dice.random() < 0.1)
        for _ in range(150)
    ]
    statuses: set[int] = set()

    def visit(plan: tuple[bool, int, int, float, bool]) -> None:
        stream, n, length, patience_s, is_nonsense = plan
        body = {"prompt": "a" * length, "n": n, "stream": stream, "max_tokens": -1 if is_nonsense else length}
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60 if patience_s > 0.015 else patience_s + 1e-3)
        with contextlib.closing(connection), contextlib.suppress(TimeoutError):
            connection.request("POST", COMPLETIONS, json.dumps(body))
            answer = connection.getresponse()
            statuses.add(answer.status)
            answer.read()

    with parrot(max_num_seqs=3, num_blocks=12, max_num_queued_reqs=6) as server:
        server.runner.step_s = 0.001
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            list(pool.map(visit, plans))
        wait_until(lambda: server.service.state.num_open == 0 and not server.scheduler.requests)
        assert {200, 429} <= statuses <= {200, 400, 429}
        queue = queue_of(server)
        wait_until(lambda: (queue.num_reqs, queue.num_tokens, queue.num_held) == (0, 0, 0))
        assert server.service.state.board.num_sequences == 0
        assert server.complete("ok")[1]["choices"][0]["text"] == "ok"


def test_an_engine_that_dies_leaves_nothing_counted() -> None:
    def die(plan: Any) -> None:
        raise RuntimeError("the roof is on fire")

    with parrot(max_num_seqs=1, max_num_queued_reqs=2) as server, server.held(), server.held():
        server.runner.before_step = die
        wait_until(lambda: server.get("/health")[0] == 503)
        wait_until(lambda: queue_of(server).num_held == 0)
        assert queue_of(server).num_reqs == 0
