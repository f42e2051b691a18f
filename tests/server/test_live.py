"""The live stream over HTTP: who gets it, what it says, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from inspect import unwrap
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.server import live
from everystop.server.live import LiveStreams

STREAM = "/ui/stream"


class Watcher(threading.Thread):
    """Reads the stream in a thread; `messages` are those that have come."""

    def __init__(self, server: ParrotServer, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(daemon=True)
        self._connection = server.connect()
        self._connection.request("GET", STREAM, headers=dict(headers or {}))
        self.answer = self._connection.getresponse()
        self.messages: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while line := self.answer.readline():
                if line != b"\n":
                    assert line.startswith(b"data: ")
                    self.messages.append(json.loads(line.removeprefix(b"data: ")))
            self.ended.set()

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self.join(60)

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        wait_until(lambda: condition(self.messages))

    def requests(self) -> dict[int, dict[str, Any]]:
        """The last that was said of each request."""
        return {one["id"]: one for message in self.messages for one in message["requests"]}


@contextlib.contextmanager
def watching(server: ParrotServer, headers: Mapping[str, str] | None = None) -> Iterator[Watcher]:
    watcher = Watcher(server, headers)
    try:
        yield watcher
    finally:
        watcher.leave()


def streams_of(server: ParrotServer) -> LiveStreams:
    """The server's own account of its readers."""
    [route] = [route for route in server.service._http.config.app.routes if route.path == STREAM]
    return unwrap(route.endpoint).__self__._streams


def test_a_reader_sees_a_request_from_its_boarding_to_its_end() -> None:
    with parrot() as server, watching(server) as watcher:
        assert watcher.answer.status == 200
        assert watcher.answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert watcher.answer.headers["cache-control"] == "no-store"
        watcher.wait(bool)
        server.complete("abcdefgh")
        watcher.wait(lambda _: any(one["state"] == "finished" for one in watcher.requests().values()))
        first, *others = watcher.messages
    assert first["full"]
    assert not any(message["full"] for message in others)
    assert first["server"] == {
        "model": "parrot",
        "version": first["server"]["version"],
        "policy": "continuous",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "num_blocks": 64,
        "block_size": 16,
        "sees": "all",
        "can_send_test": True,
    }
    [request] = watcher.requests().values()
    assert (request["num_prompt_tokens"], request["num_output_tokens"], request["slot"]) == (8, 9, 0)
    assert request["arrival_ns"] <= request["admit_ns"] < request["first_token_ns"] < request["finish_ns"]
    steps = [step for message in watcher.messages for step in message["steps"]]
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    assert sum(sum(step[-1][3::4]) for step in steps) == 9
    assert watcher.messages[-1]["dropped"] == 0


KEY = "sk-schlüssel"
BEARER = {"authorization": "Bearer " + KEY.encode().decode("latin-1")}


def test_the_stream_needs_the_key_where_there_is_one() -> None:
    with parrot(api_keys=(KEY, "sk-other")) as server:
        status, headers, body = server.request("GET", STREAM)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert server.get(f"{STREAM}?api_key=sk-other")[0] == 401
        with watching(server, BEARER) as watcher:
            assert watcher.answer.status == 200
            watcher.wait(bool)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_sees_its_own_requests_and_an_admin_all_of_them() -> None:
    keys = {"api_keys": ("sk-a", "sk-b"), "admin_keys": ("sk-root",)}
    with (
        parrot(**keys) as server,
        watching(server, bearer("sk-a")) as one,
        watching(server, bearer("sk-b")) as other,
        watching(server, bearer("sk-root")) as admin,
    ):
        watchers = (one, other, admin)
        names = []
        for key, prompt in (("sk-a", "aaaa"), ("sk-b", "bbbbbbbb")):
            status, answer = server.post("/v1/completions", {"prompt": prompt}, bearer(key))
            assert status == 200
            names.append(answer["id"])
        for watcher in watchers:
            watcher.wait(
                lambda _, watcher=watcher: [r["state"] for r in watcher.requests().values()] == ["finished"] * 2
            )
        assert [watcher.messages[0]["server"]["sees"] for watcher in watchers] == ["own", "own", "all"]
        told = [{one["name"]: one["num_prompt_tokens"] for one in watcher.requests().values()} for watcher in watchers]
        assert told == [{names[0]: 4, None: None}, {None: None, names[1]: 8}, {names[0]: 4, names[1]: 8}]
        for watcher, stranger in ((one, names[1]), (other, names[0])):
            assert stranger not in json.dumps(watcher.messages)
            assert "another request" in json.dumps(watcher.messages)
            assert sum(sum(step[-1][3::4]) for m in watcher.messages for step in m["steps"]) == 14


def test_nothing_is_written_by_the_stream(server: ParrotServer) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert server.request(method, STREAM)[0] == 405
    status, headers, body = server.request("HEAD", STREAM)
    assert (status, headers["content-type"], body) == (200, "text/event-stream; charset=utf-8", b"")


def test_more_readers_than_are_served_are_refused_until_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_READERS", 2)
    with parrot() as server, watching(server) as one:
        one.wait(bool)
        with watching(server) as other:
            other.wait(bool)
            status, headers, body = server.request("GET", STREAM)
            assert (status, headers["retry-after"]) == (429, "10")
            assert json.loads(body)["error"]["code"] == "too_many_readers"
            server.complete("abc")
            for watcher in (one, other):
                watcher.wait(lambda _, watcher=watcher: len(watcher.requests()) == 1)
        wait_until(lambda: streams_of(server)._num_readers == 1)
        with watching(server) as third:
            third.wait(lambda messages: bool(messages) and len(messages[0]["requests"]) == 1)
            assert third.messages[0]["full"]


def test_nothing_is_kept_for_readers_when_there_are_none(server: ParrotServer) -> None:
    streams = streams_of(server)
    with watching(server) as watcher:
        watcher.wait(bool)
        assert streams._live is not None
    wait_until(lambda: streams._live is None)


def test_an_idle_server_says_so_once_a_second() -> None:
    with parrot() as server, watching(server) as watcher:
        watcher.wait(lambda messages: any("kv" in message for message in messages))
        num_plans, num_messages = server.scheduler._next_step_id, len(watcher.messages)
        watcher.wait(lambda messages: len(messages) >= num_messages + 2)
        told = watcher.messages.copy()
        for message in told:
            assert not message["steps"]
            assert message["tiles"]["slots_busy"] == 0
        assert told[-1]["now_ns"] - told[-2]["now_ns"] >= 900_000_000
        assert server.scheduler._next_step_id == num_plans, "a reader must not make an idle engine plan"


def test_the_stream_ends_when_a_server_has_drained() -> None:
    with parrot() as server, watching(server) as watcher:
        go_on = server.runner.hold_after_first_token()
        answer: list[Any] = []
        client = threading.Thread(target=lambda: answer.append(server.complete("a" * 40)))
        client.start()
        watcher.wait(lambda _: any(one["state"] == "running" for one in watcher.requests().values()))
        server.stop()
        wait_until(lambda: server.get("/health")[0] == 503)
        go_on.set()
        client.join(60)
        assert watcher.ended.wait(60)
        assert server.join() == 0
    assert answer[0][0] == 200
    assert watcher.messages[-1]["end"] == "the server is shutting down"
    assert [one["state"] for one in watcher.requests().values()] == ["finished"]


def test_the_stream_ends_when_the_engine_fails() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("broken")

    with parrot() as server, watching(server) as watcher:
        watcher.wait(bool)
        server.runner.before_step = fail
        assert server.complete("abc")[0] == 503
        assert watcher.ended.wait(60)
        assert watcher.messages[-1]["end"] == "the engine has failed"
        assert server.request("GET", STREAM)[0] == 503


def test_before_the_model_is_there_nothing_is_to_be_seen() -> None:
    with parrot(hold_loading=True) as server:
        status, headers, body = server.request("GET", STREAM)
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "loading"


def test_a_reader_that_takes_nothing_is_left_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "everystop.server.live")
    monkeypatch.setattr(live, "SEND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(live, "encode", lambda message: b" " * 1_000_000)
    monkeypatch.setattr(live, "QUIET_S", 0.0)
    with parrot() as server, socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.sendall(b"GET /ui/stream HTTP/1.1\r\nHost: x\r\n\r\n")
        streams = streams_of(server)
        wait_until(lambda: "a reader of the live stream took nothing" in caplog.text)
        wait_until(lambda: streams._num_readers == 0)
        assert server.complete("abc")[0] == 200
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_an_http_1_0_client_gets_events_until_the_connection_ends(server: ParrotServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /ui/stream HTTP/1.0\r\n\r\n")
        received = b""
        while b"\n\n" not in received:
            received += connection.recv(65536)
    assert b'data: {"full":true' in received


def past_of(server: ParrotServer, before_ns: object, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    status, body = server.get(f"/ui/past?before_ns={before_ns}", dict(headers or {}))
    return status, json.loads(body) if isinstance(body, bytes) else body


def test_the_past_tells_what_the_stream_has_told() -> None:
    with parrot() as server, watching(server) as watcher:
        server.complete("abcdefgh")
        watcher.wait(lambda _: any(one["state"] == "finished" for one in watcher.requests().values()))
        steps = [step for message in watcher.messages for step in message["steps"]]
        status, past = past_of(server, steps[-1][2])
        assert status == 200
        assert past["steps"] == steps[:-1]
        assert [one["id"] for one in past["requests"]] == list(watcher.requests())
        assert (past["now_ns"], past["more"]) == (steps[-2][2], False)
        assert past_of(server, steps[0][2])[1]["steps"] == []
        whole = past_of(server, steps[-1][2] + 1)[1]
        assert whole["steps"] == steps
        assert len(whole["acts"]) >= 1


@pytest.mark.parametrize("query", ["", "?before_ns=", "?before_ns=-1", "?before_ns=1e9", "?before_ns=x",
                                   "?before_ns=" + "9" * 19, "?before_ns=1&before_ns=2"])  # fmt: skip
def test_a_time_that_is_none_is_refused(query: str) -> None:
    with parrot() as server:
        status, body = server.get(f"/ui/past{query}")
        assert status == 400
        assert b"before_ns" in body


def test_no_more_than_two_stretches_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_PAST", 0)
    with parrot() as server:
        status, body = server.get("/ui/past?before_ns=1")
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_readers")
