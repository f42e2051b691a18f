"""A proxy that writes down what clients send, and passes everything on unchanged, streams piece by piece."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass(frozen=True)
class Exchange:
    """One request with its JSON body, None for one without, and the status that it got."""

    method: str
    path: str
    body: Any
    status: int


class RecordingProxy:
    """Listens on a free port of this machine while its context lasts; `exchanges` are in the order of the answers."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[Exchange] = []
        handler = type("Handler", (_Handler,), {"upstream": urlsplit(upstream).netloc, "exchanges": self.exchanges})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    exchanges: list[Exchange]

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in (*HOP_BY_HOP, "host")}
        connection = http.client.HTTPConnection(self.upstream, timeout=120)
        try:
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            self.exchanges.append(Exchange(self.command, self.path, json.loads(body) if body else None, answer.status))
            self._answer(answer)
        finally:
            connection.close()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        length = answer.getheader("content-length")
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if length is None:
            self.send_header("connection", "close")
            self.close_connection = True
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""
