"""A streaming HTTP front around OpenVINO GenAI's ContinuousBatchingPipeline: one thread, one job.

Runs in the peer's own environment and imports nothing of this project. Between two steps it takes what clients have
sent and hands out the tokens of the last step, one event a token, so the pipeline is never held up by a second thread.
`/stats` says how much time went into steps, and how much into this front while there was work.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

READ_BYTES = 1 << 16
SEND_TIMEOUT_S = 10.0
TAKEN = {"prompt", "max_tokens", "temperature", "ignore_eos", "stream", "stream_options"}
USAGE = {"include_usage": True}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Refused(Exception):
    """A request that this front does not take; the text goes to the client."""


class Client:
    """One connection: bytes that have come and make no request yet, and the answer that is under way."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.waiting = b""
        self.handle: Any = None
        self.decode: Callable[[int], str | None] = lambda token: None
        self.num_prompt = 0
        self.num_output = 0

    def requests(self, piece: bytes) -> list[tuple[str, str, bytes]]:
        """(method, path, body) of each request that this piece completes."""
        self.waiting += piece
        found = []
        while b"\r\n\r\n" in self.waiting:
            head, _, rest = self.waiting.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            length = int(headers.get("content-length", "0"))
            if len(rest) < length:
                break
            method, path, _ = first.split(" ", 2)
            found.append((method, path, rest[:length]))
            self.waiting = rest[length:]
        return found

    def reply(self, status: str, body: Any) -> None:
        """A whole answer."""
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.connection.sendall(head.encode() + data)

    def send_tokens(self, tokens: list[int], *, is_over: bool) -> None:
        """An event for each token, and the end of the answer where it is over."""
        head = STREAM_HEAD if self.num_output == 0 else b""
        self.num_output += len(tokens)
        events = [chunk({"choices": [{"index": 0, "text": self.decode(token) or ""}]}) for token in tokens]
        if is_over:
            usage = {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_output}
            usage["total_tokens"] = self.num_prompt + self.num_output
            events.append(chunk({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
            events.append(chunk({"choices": [], "usage": usage}))
            events.append(chunk("[DONE]") + b"0\r\n\r\n")
        self.connection.sendall(head + b"".join(events))


def chunk(data: Any) -> bytes:
    """One event as one piece of a chunked body."""
    text = data if isinstance(data, str) else json.dumps(data)
    event = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


class Front:
    """Clients, and the pipeline that they share.

    `add(token_ids, max_tokens)` gives a handle with `take()` -> (tokens, is_over) and `drop()`; `step()` does one step;
    `make_decoder()` gives a function from a token to the text that it completes.
    """

    def __init__(
        self,
        port: int,
        add: Callable[[list[int], int], Any],
        step: Callable[[], None],
        make_decoder: Callable[[], Callable[[int], str | None]],
    ) -> None:
        self._add, self._step, self._make_decoder = add, step, make_decoder
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._active: list[Client] = []
        self._steps, self._step_s, self._front_s = 0, 0.0, 0.0

    def serve(self) -> None:
        """Until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has come; if there is work, do one step and hand out its tokens."""
        ready = self._selector.select(0 if self._active else None)
        began_s = time.perf_counter()
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        if not self._active:
            return
        step_s = time.perf_counter()
        self._step()
        done_s = time.perf_counter()
        self._hand_out()
        self._steps += 1
        self._step_s += done_s - step_s
        self._front_s += step_s - began_s + time.perf_counter() - done_s

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_TIMEOUT_S)
        self._selector.register(connection, selectors.EVENT_READ, Client(connection))

    def _read(self, client: Client) -> None:
        try:
            piece = client.connection.recv(READ_BYTES)
            if not piece:
                raise ConnectionError("closed by the client")
            for method, path, body in client.requests(piece):
                self._answer(client, method, path, body)
        except (OSError, ValueError):
            self._close(client)

    def _answer(self, client: Client, method: str, path: str, body: bytes) -> None:
        if method == "GET" and path == "/health":
            client.reply("200 OK", {"status": "ok"})
        elif method == "GET" and path == "/stats":
            stats = {"steps": self._steps, "step_s": self._step_s, "front_s": self._front_s}
            client.reply("200 OK", stats)
        elif method == "POST" and path == "/v1/completions":
            try:
                prompt, max_tokens = read_request(body)
                if client.handle is not None:
                    raise Refused("one request at a time on a connection")
            except Refused as error:
                client.reply("400 Bad Request", {"error": {"message": str(error)}})
                return
            client.decode, client.num_prompt, client.num_output = self._make_decoder(), len(prompt), 0
            client.handle = self._add(prompt, max_tokens)
            self._active.append(client)
        else:
            client.reply("404 Not Found", {"error": {"message": f"no {method} {path} here"}})

    def _hand_out(self) -> None:
        for client in list(self._active):
            tokens, is_over = client.handle.take()
            if is_over:
                self._active.remove(client)
                client.handle = None
            if tokens or is_over:
                try:
                    client.send_tokens(tokens, is_over=is_over)
                except OSError:
                    self._close(client)

    def _close(self, client: Client) -> None:
        if client in self._active:
            self._active.remove(client)
            client.handle.drop()
        self._selector.unregister(client.connection)
        client.connection.close()


def read_request(body: bytes) -> tuple[list[int], int]:
    """Prompt and length of an answer; raises Refused for all but a greedy stream of fixed length."""
    try:
        plain = json.loads(body)
    except ValueError:
        raise Refused("the body is not JSON") from None
    if not isinstance(plain, dict):
        raise Refused("the body must be a JSON object")
    if unknown := sorted(plain.keys() - TAKEN):
        raise Refused(f"{', '.join(unknown)}: not taken here")
    prompt, max_tokens = plain.get("prompt"), plain.get("max_tokens")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise Refused("prompt must be a list of token ids")
    if type(max_tokens) is not int or max_tokens < 1:
        raise Refused("max_tokens must be a whole number from 1")
    if plain.get("stream_options", USAGE) != USAGE:
        raise Refused("stream_options: usage is always sent")
    if plain.get("stream") is not True or plain.get("temperature") != 0 or plain.get("ignore_eos") is not True:
        raise Refused("only stream true, temperature 0 and ignore_eos true are served")
    return prompt, max_tokens


class Handle:
    """A generation of the pipeline."""

    def __init__(self, inner: Any, finished: Any) -> None:
        self._inner = inner
        self._running = finished.RUNNING

    def take(self) -> tuple[list[int], bool]:
        """Tokens since the last call, and whether there will be no more."""
        tokens: list[int] = []
        while self._inner.can_read():
            for output in self._inner.read().values():
                tokens += output.generated_ids
        return tokens, self._inner.get_status() != self._running

    def drop(self) -> None:
        """Nobody wants the rest."""
        self._inner.cancel()


def main() -> None:
    """Load the pipeline and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--tokenizer", "--precision", "--kv-precision"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--threads", "--cache-gb", "--max-num-batched-tokens", "--max-num-seqs"):
        parser.add_argument(name, required=True, type=int)
    arguments = parser.parse_args()

    import numpy as np
    import openvino
    import openvino_genai as genai
    import tokenizers

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
    scheduler.max_num_seqs = arguments.max_num_seqs
    scheduler.cache_size = arguments.cache_gb
    properties = {
        "INFERENCE_PRECISION_HINT": arguments.precision,
        "KV_CACHE_PRECISION": arguments.kv_precision,
        "INFERENCE_NUM_THREADS": arguments.threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
    tokenizer = tokenizers.Tokenizer.from_file(arguments.tokenizer)
    numbers = iter(range(1 << 62))

    def add(token_ids: list[int], max_tokens: int) -> Handle:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.ignore_eos = True
        ids = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        return Handle(pipeline.add_request(next(numbers), ids, config), genai.GenerationStatus)

    def make_decoder() -> Callable[[int], str | None]:
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
        return lambda token: stream.step(tokenizer, token)

    Front(arguments.port, add, pipeline.step, make_decoder).serve()


if __name__ == "__main__":
    main()
