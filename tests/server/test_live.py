"""The live stream over HTTP: who gets it, what it says, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.server import live

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
        self.join(10)

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
