"""The soak's clients: each does one thing after the other, at random, and every answer that comes whole is compared."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.soak_queries import COMPLETIONS, Query, canonical, put_together, refusals

TIMEOUT_S = 60.0
LONG_BODY = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 300, "temperature": 0}
ACTIONS = {
    "whole": 40, "stream": 22, "leave while sending": 4, "leave at once": 4, "leave while waiting": 6,
    "leave while reading": 10, "be refused": 6, "come without a key": 2, "read slowly": 3, "look": 3,
}  # fmt: skip


class Tally:
    """What all clients have done and seen; may be written to by all of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def add(self, name: str, num: int = 1) -> None:
        """Count something."""
        with self._lock:
            self.counts[name] += num

    def fault(self, text: str) -> None:
        """Note something that must not be; the first hundred are kept."""
        with self._lock:
            self.counts["faults"] += 1
            if len(self.faults) < 100:
                self.faults.append(text)


class Client:
    """One client of a server; `answers` are what each of `queries` yields alone."""

    def __init__(self, url: str, keys: Sequence[str], tally: Tally, rng: random.Random) -> None:
        self._address = urlsplit(url)
        self._keys = keys
        self._tally = tally
        self._rng = rng

    def run(self, queries: Sequence[Query], answers: Sequence[Any], until: threading.Event) -> None:
        """One action after the other."""
        acts = {
            "whole": self._whole,
            "stream": self._stream,
            "leave while sending": lambda *_: self._leave("sending"),
            "leave at once": lambda *_: self._leave("at once"),
            "leave while waiting": lambda *_: self._leave("waiting"),
            "leave while reading": lambda *_: self._leave("reading"),
            "be refused": lambda *_: self._be_refused(),
            "come without a key": lambda *_: self._come_without_key(),
            "read slowly": lambda *_: self._read_slowly(),
            "look": lambda *_: self._look(),
        }
        while not until.is_set():
            name = self._rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            index = self._rng.randrange(len(queries))
            self._tally.add(name)
            try:
                acts[name](queries[index], answers[index])
            except Exception as error:
                self._tally.fault(f"{name}: {type(error).__name__}: {error}")

    def ask(self, query: Query) -> Any:
        """The whole answer to a request, as `canonical` has it; None where the server is too busy."""
        status, headers, body = self._request("POST", query.path, json.dumps(query.body).encode())
        if self._is_too_busy(status, headers):
            return None
        if status != 200:
            raise ValueError(f"{status} for {query}: {body[:300]!r}")
        return canonical(json.loads(body))

    # ------------------------------------------------------------------ actions

    def _whole(self, query: Query, answer: Any) -> None:
        given = self.ask(query)
        if given is not None:
            self._compare(query, given, answer, "whole")

    def _stream(self, query: Query, answer: Any) -> None:
        body = {**query.body, "stream": True, "stream_options": {"include_usage": True}}
        with self._posted(query.path, body) as response:
            if self._is_too_busy(response.status, dict(response.getheaders())):
                response.read()
                return
            if response.status != 200:
                raise ValueError(f"{response.status} for {query}: {response.read()[:300]!r}")
            self._compare(query, put_together(events_of(response)), answer, "streamed")

    def _compare(self, query: Query, given: Any, answer: Any, how: str) -> None:
        if given != answer:
            self._tally.fault(f"{how}, {query} yields {given}, and alone {answer}")
        self._tally.add("compared answers")
        self._tally.add("compared sequences", query.num_sequences)
        self._tally.add("compared tokens", given[2])

    def _leave(self, when: str) -> None:
        """A client that goes away in some phase of its request."""
        rng = self._rng
        prompt = "a long prompt " * rng.choice([1, 1, 40])
        body = json.dumps({**LONG_BODY, "prompt": prompt, "stream": rng.random() < 0.5, "n": rng.choice([1, 1, 3])})
        message = self._message(body)
        with self._socket() as connection:
            if when == "sending":
                message = message[: rng.randrange(len(message))]
            connection.sendall(message)
            if when == "waiting":
                time.sleep(rng.random() * 0.2)
            for _ in range(rng.randint(1, 12) if when == "reading" else 0):
                if not connection.recv(256):
                    break
            if rng.random() < 0.5:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def _be_refused(self) -> None:
        path, body, expected = self._rng.choice(refusals())
        status, _, answer = self._request("POST", path, body)
        if status not in (expected, 429, 503):
            raise ValueError(f"{status} instead of {expected} for {body[:80]!r}: {answer[:200]!r}")

    def _come_without_key(self) -> None:
        status, _, _ = self._request("POST", COMPLETIONS, b'{"prompt": "a"}', key="no-such-key")
        if status != 401:
            raise ValueError(f"{status} instead of 401")

    def _read_slowly(self) -> None:
        """A stream read in small pieces with pauses, then left or read to its end; it may be cut off meanwhile."""
        with self._socket(receive_bytes=2048) as connection:
            body = json.dumps({**LONG_BODY, "stream": True})
            connection.sendall(self._message(body))
            with contextlib.suppress(ConnectionError):
                for _ in range(self._rng.randint(5, 60)):
                    if not connection.recv(200):
                        return
                    time.sleep(0.05)
                if self._rng.random() < 0.5:
                    while connection.recv(65536):
                        pass

    def _look(self) -> None:
        path = self._rng.choice(["/health", "/metrics", "/v1/models"])
        status, _, _ = self._request("GET", path)
        if status != 200:
            raise ValueError(f"{status} for {path}")

    # ------------------------------------------------------------------ connections

    def _is_too_busy(self, status: int, headers: dict[str, str]) -> bool:
        if status not in (429, 503):
            return False
        advice = {name.lower(): value for name, value in headers.items()}.get("retry-after", "0")
        if int(advice) < 1:
            raise ValueError(f"{status} without Retry-After")
        self._tally.add(f"answered with {status}")
        time.sleep(0.2)
        return True

    def _request(
        self, method: str, path: str, body: bytes | None = None, key: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(self._connection()) as connection:
            connection.request(method, path, body, self._headers(key))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    @contextlib.contextmanager
    def _posted(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(self._connection()) as connection:
            connection.request("POST", path, json.dumps(body), self._headers())
            yield connection.getresponse()

    def _message(self, body: str) -> bytes:
        """A whole request, whose connection ends with the answer."""
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {self._rng.choice(self._keys)}\r\nContent-Length: {len(body)}\r\n\r\n"
        return (head + body).encode()

    def _headers(self, key: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self._rng.choice(self._keys)}"}

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=TIMEOUT_S)

    @contextlib.contextmanager
    def _socket(self, receive_bytes: int | None = None) -> Iterator[socket.socket]:
        with socket.socket() as connection:
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.settimeout(TIMEOUT_S)
            connection.connect((self._address.hostname, self._address.port))
            yield connection


def events_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream; raises ValueError where it ends without [DONE]."""
    for line in response:
        text = line.decode().strip()
        if text == "data: [DONE]":
            response.read()
            return
        if text.startswith("data: "):
            yield json.loads(text.removeprefix("data: "))
    raise ValueError("a stream ended without [DONE]")
