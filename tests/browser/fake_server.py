"""A server with the real pages and made-up data: a stream that a test feeds, explanations, answers to test prompts."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from everystop.server.ui import FOLDER, POLICY, TYPES

END: None = None


class FakeServer:
    """`send` puts a message on every stream; `explanations` are by id; with a `key` all data needs it.

    A new stream begins with `first`; `asked` are the requests as (method, path, key). `estimates` are what is answered
    by id where `?what_if=true` asks for it: a status and JSON. Of the past nothing is remembered, or there is a
    `past_error`, a status and a message; nobody is answered about it before `tells_past` is set.
    """

    def __init__(self) -> None:
        self.first: list[dict[str, Any]] = []
        self.explanations: dict[str, dict[str, Any]] = {}
        self.estimates: dict[str, tuple[int, dict[str, Any]]] = {}
        self.past_error: tuple[int, str] | None = None
        self.tells_past = threading.Event()
        self.tells_past.set()
        self.key: str | None = None
        self.asked: list[tuple[str, str, str | None]] = []
        self.bodies: list[dict[str, Any]] = []
        self._streams: list[queue.Queue[dict[str, Any] | None]] = []
        self._takes_streams = threading.Event()
        self._takes_streams.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        """End all streams and the server."""
        self.end_streams()
        self.take_streams()
        self.tells_past.set()
        self._http.shutdown()
        self._http.server_close()

    def send(self, message: dict[str, Any]) -> None:
        """Put a message on the open streams."""
        for stream in self._streams:
            stream.put(message)

    def end_streams(self) -> None:
        """Close the open streams; who asks for another one waits until `take_streams`."""
        self._takes_streams.clear()
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.put(END)

    def take_streams(self) -> None:
        """Begin the streams that have been asked for."""
        self._takes_streams.set()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Serve one request."""
        key = handler.headers.get("Authorization")
        path = handler.path
        self.asked.append((handler.command, path, key))
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        file = self._file(path)
        if file is not None:
            _reply(handler, 200, TYPES[file.suffix], file.read_bytes())
        elif self.key is not None and key != f"Bearer {self.key}":
            _reply_json(handler, 401, {"error": {"message": "a valid API key is needed"}})
        elif path == "/ui/stream":
            self._stream(handler)
        elif path.startswith("/ui/past?before_ns="):
            self.tells_past.wait()
            if self.past_error is not None:
                status, why = self.past_error
                _reply_json(handler, status, {"error": {"message": why}})
                return
            now_ns = int(path.partition("=")[2])
            nothing: dict[str, list[Any]] = {"steps": [], "requests": [], "acts": []}
            _reply_json(handler, 200, nothing | {"from_ns": now_ns, "now_ns": now_ns, "more": False})
        elif path == "/v1/completions":
            self.bodies.append(asked := json.loads(body))
            of_one = ["word "] * asked["max_tokens"] + [""]
            choices = [
                {"index": index, "text": text, "finish_reason": None if text else "length"}
                for text in of_one
                for index in range(len(asked["prompt"]))
            ]
            events = [*(json.dumps({"choices": [choice]}) for choice in choices), "[DONE]"]
            _reply(handler, 200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())
        elif path.endswith("/explain?what_if=true"):
            _reply_json(
                handler, *self.estimates[path.removeprefix("/v1/requests/").removesuffix("/explain?what_if=true")]
            )
        else:
            explanation = self.explanations.get(path.removeprefix("/v1/requests/").removesuffix("/explain"))
            unknown = {"error": {"message": "no such request is known; only the last 10,000 are remembered"}}
            _reply_json(handler, 404 if explanation is None else 200, explanation or unknown)

    def _file(self, path: str) -> Path | None:
        if path == "/ui":
            return FOLDER / "index.html"
        if path.startswith("/ui/r/"):
            return FOLDER / "request.html"
        file = FOLDER / path.removeprefix("/ui/")
        return file if path.startswith("/ui/") and file.is_file() else None

    def _stream(self, handler: BaseHTTPRequestHandler) -> None:
        self._takes_streams.wait()
        stream: queue.Queue[dict[str, Any] | None] = queue.Queue()
        for message in self.first:
            stream.put(message)
        self._streams.append(stream)
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        try:
            while (message := stream.get()) is not END:
                handler.wfile.write(f": a comment\n\ndata: {json.dumps(message)}\n\n".encode())
                handler.wfile.flush()
        except OSError:
            pass  # the page has been closed
        handler.close_connection = True


def _reply_json(handler: BaseHTTPRequestHandler, status: int, value: Any) -> None:
    _reply(handler, status, "application/json", json.dumps(value).encode())


def _reply(handler: BaseHTTPRequestHandler, status: int, kind: str, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Content-Security-Policy", POLICY)
    handler.send_header("X-Content-Type-Options", "nosniff")
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A server for the time of a test."""
    server = FakeServer()
    try:
        yield server
    finally:
        server.close()
