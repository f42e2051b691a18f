"""A tiny HTTP server that answers completions from a script, byte for byte as a test wants them on the wire."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def event(data: Any) -> bytes:
    """One event of a stream."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def text_event(text: str) -> bytes:
    """A piece of a completion."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def ending(num_prompt: int, num_output: int) -> bytes:
    """Finish reason, usage, and the end mark."""
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    finish = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    return finish + event({"choices": [], "usage": usage}) + event("[DONE]")


def in_chunks(body: bytes, size: int) -> bytes:
    """HTTP's chunked coding with chunks of `size` bytes."""
    pieces = (body[i : i + size] for i in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def whole_answer(request: dict[str, Any], chunk_size: int = 1 << 20) -> bytes:
    """As many one-word events as tokens were asked for, with exact usage."""
    words = b"".join(text_event(f" {request['prompt'][0]}") for _ in range(request["max_tokens"]))
    return HEAD + in_chunks(words + ending(len(request["prompt"]), request["max_tokens"]), chunk_size) + LAST_CHUNK


@dataclass
class FakeServer:
    """What was asked, and how many requests were open at once at most."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    most_open: int = 0


@contextmanager
def fake_server(answer: Callable[[dict[str, Any]], bytes | None], wait_for: int = 1) -> Iterator[FakeServer]:
    """Serve on a free port: `answer` turns a request's body into all bytes of the answer, after which a connection is
    closed if they say so; None closes it without an answer. No answer is sent before `wait_for` requests are open at
    once.
    """
    seen = FakeServer("")
    state = threading.Condition()
    num_open = 0

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with state:
                seen.num_connections += 1
            with contextlib.suppress(ConnectionError):  # the client has gone, as some tests have it
                self.answer_all()

        def answer_all(self) -> None:
            nonlocal num_open
            while (body := self.read_request()) is not None:
                with state:
                    num_open += 1
                    seen.requests.append(body)
                    seen.most_open = max(seen.most_open, num_open)
                    state.notify_all()
                    state.wait_for(lambda: seen.most_open >= wait_for, timeout=60)
                sent = answer(body)
                with state:
                    num_open -= 1
                if sent is not None:
                    self.wfile.write(sent)
                if sent is None or b"Connection: close" in sent:
                    return

        def read_request(self) -> dict[str, Any] | None:
            length = 0
            while (line := self.rfile.readline().strip()) or length == 0:
                if not line:
                    return None
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            return dict(json.loads(self.rfile.read(length)))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        seen.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()
