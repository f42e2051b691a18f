"""The HTTP front: what it takes, what it refuses, and what clients get, over a pipeline that counts."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.peers.openvino_front import Refused, read_request
from tests.benchmarks.peers.fake import make_front

from everystop.sim.workloads import Job, Workload
from everystop.trial.http_client import Target
from everystop.trial.http_load import run_load

ASKED: dict[str, Any] = {
    "prompt": [5, 6],
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
def port() -> Iterator[int]:
    """A front in a thread of its own."""
    front, is_over = make_front(0), threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            front.turn()

    thread = threading.Thread(target=serve)
    thread.start()
    yield front.port
    is_over.set()
    socket.create_connection(("127.0.0.1", front.port)).close()  # wakes it
    thread.join()
    front.close()


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_load_generator_counts_an_event_a_token_and_exact_usage(port: int) -> None:
    jobs = tuple(Job(prompt=(10 * i, 1, 2), max_tokens=3 + i) for i in range(6))
    run = run_load(Workload("some", 3, jobs), Target(url=f"http://127.0.0.1:{port}"))
    figures = run.summary()
    assert (figures["errors"], figures["exact_usage"], figures["events_per_token"]) == (0, 6, 1.0)
    assert [record.text for record in run.records][:2] == ["0 1 2 ", "10 11 12 13 "]


def test_its_own_figures_count_steps_and_both_kinds_of_time(port: int) -> None:
    run_load(Workload("some", 1, (Job(prompt=(1,), max_tokens=4),)), Target(url=f"http://127.0.0.1:{port}"))
    stats = json.loads(ask(port, "GET", "/stats")[1])
    assert stats["steps"] == 4
    assert stats["step_s"] > 0
    assert stats["front_s"] > 0


def test_a_client_that_leaves_takes_its_request_along(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps(ASKED | {"max_tokens": 1_000_000}).encode())
    assert connection.getresponse().read(6)
    connection.close()
    run = run_load(Workload("some", 1, (Job(prompt=(1,), max_tokens=2),)), Target(url=f"http://127.0.0.1:{port}"))
    assert run.summary()["errors"] == 0
    steps = json.loads(ask(port, "GET", "/stats")[1])["steps"]
    assert json.loads(ask(port, "GET", "/stats")[1])["steps"] == steps


def test_what_it_cannot_do_is_refused_and_the_connection_stays(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps(ASKED | {"top_p": 0.5}).encode())
    answer = connection.getresponse()
    assert answer.status == 400
    assert "top_p" in json.loads(answer.read())["error"]["message"]
    connection.request("POST", "/v1/completions", json.dumps(ASKED).encode())
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()
    assert ask(port, "GET", "/nothing")[0] == 404


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": "text"}, "list of token ids"),
        ({"prompt": []}, "list of token ids"),
        ({"prompt": [True]}, "list of token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.7}, "temperature 0"),
        ({"stream": False}, "stream true"),
        ({"ignore_eos": False}, "ignore_eos true"),
        ({"stream_options": {}}, "usage is always sent"),
        ({"model": "other"}, "model: not taken"),
    ],
)
def test_requests_for_anything_but_a_greedy_stream_are_refused(change: dict[str, Any], words: str) -> None:
    assert read_request(json.dumps(ASKED).encode()) == ([5, 6], 3)
    with pytest.raises(Refused, match=words):
        read_request(json.dumps(ASKED | change).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{"])
def test_bodies_that_are_no_object_are_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="JSON"):
        read_request(body)
