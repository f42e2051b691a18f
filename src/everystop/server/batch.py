"""`everystop batch`: answers a file of requests through the routes and the engine of the server, without a port."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from starlette.types import ASGIApp, Message

from everystop.config import Config
from everystop.core.errors import ConfigError, EngineDead
from everystop.engine.messages import StepOutput
from everystop.server.opening import Opening
from everystop.server.routes import make_app
from everystop.server.state import Phase, ServedModel, ServerState

URLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of the input, in the form of OpenAI's batch API."""

    custom_id: str
    url: str
    body: dict[str, Any]


def run_batch(config: Config, source: Path, target: Path) -> int:
    """Answer the requests of `source` that `target` has no answer for; returns the exit code.

    Each line of `source` is `{"custom_id", "method": "POST", "url", "body"}`; each line of `target` gets
    `{"custom_id", "response": {"status_code", "body"}, "error"}`, in the order in which they end, written and flushed
    one by one. A run that was interrupted, even inside a line, goes on where it stopped. Raises ConfigError for a file
    that cannot be read or written, naming the line.
    """
    num_lines = sum(1 for _ in _read_requests(source))
    done = _answered_ids(target)
    opening = Opening(config, 0)
    try:
        with target.open("a", encoding="utf-8") as out:
            return asyncio.run(_Batch(opening.load(), out).run(source, done, num_lines))
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror or error}; name a file that can be written") from error
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to go on with {target}", file=sys.stderr)
        return 130


class _Batch:
    """Sends requests through the ASGI application, as many at once as keep the engine full."""

    def __init__(self, model: ServedModel, out: IO[str]) -> None:
        self._model = model
        self._out = out
        self._state = ServerState()
        self._app: ASGIApp = make_app(self._state)
        self._num_answered = 0
        self._num_refused = 0

    async def run(self, source: Path, done: set[str], num_lines: int) -> int:
        loop, engine = asyncio.get_running_loop(), self._model.engine
        self._state.open(self._model)
        board = self._state.board

        def deliver(outputs: list[StepOutput]) -> None:
            loop.call_soon_threadsafe(board.deliver, outputs)

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        engine.on_outputs, engine.on_failure = deliver, fail
        engine.start()
        room = asyncio.Semaphore(min(256, self._model.max_sequences // 4))
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in _read_requests(source):
                    if line.custom_id not in done:
                        await room.acquire()
                        tasks.create_task(self._answer(line, room))
        finally:
            await asyncio.to_thread(engine.stop)
        skipped = f", {len(done):,} were already there" if done else ""
        print(
            f"{self._num_answered:,} of {num_lines:,} requests answered, {self._num_refused:,} refused{skipped}",
            file=sys.stderr,
        )
        return 1 if self._state.phase is Phase.FAILED else 0

    def _fail(self, error: BaseException) -> None:
        self._state.phase = Phase.FAILED
        self._state.board.fail_all(EngineDead(f"the engine has failed: {error}"))

    async def _answer(self, line: BatchLine, room: asyncio.Semaphore) -> None:
        try:
            status, body = await self._post(line)
        finally:
            room.release()
        if status >= 500:
            return  # our failure, not the request's: the next run tries again
        self._num_answered += status < 400
        self._num_refused += status >= 400
        answer = {
            "custom_id": line.custom_id,
            "response": {"status_code": status, "body": body},
            "error": body.get("error"),
        }
        self._out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._out.flush()

    async def _post(self, line: BatchLine) -> tuple[int, dict[str, Any]]:
        """Status and JSON body of one POST to the application."""
        if line.body.get("stream"):
            message = "stream cannot be true in a batch: there is nobody to stream to; leave it out"
            return 400, {
                "error": {"message": message, "type": "invalid_request_error", "param": "stream", "code": None}
            }
        path = line.url.encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        body = json.dumps(line.body).encode()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status, received = 500, bytearray()

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await asyncio.Event().wait()  # the client of a batch never goes away
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                received.extend(message.get("body", b""))

        await self._app(scope, receive, send)
        answer: dict[str, Any] = json.loads(bytes(received))
        return status, answer


def _read_requests(source: Path) -> Iterator[BatchLine]:
    """The requests of a file, checked; raises ConfigError that names the line."""
    seen: set[str] = set()
    try:
        with source.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, start=1):
                if text.strip():
                    yield _parse_line(text, f"{source} line {number}", seen)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _parse_line(text: str, where: str, seen: set[str]) -> BatchLine:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise ConfigError(f'{where} must be an object with "custom_id", "url" and a "body" object')
    custom_id, url, method = value.get("custom_id"), value.get("url"), value.get("method", "POST")
    if not isinstance(custom_id, str) or custom_id in seen:
        raise ConfigError(f"{where}: custom_id {custom_id!r} must be a string that no other line has")
    if url not in URLS or method != "POST":
        raise ConfigError(f"{where}: {method} {url!r} is not served; use POST with {' or '.join(URLS)}")
    seen.add(custom_id)
    return BatchLine(custom_id, url, value["body"])


def _answered_ids(target: Path) -> set[str]:
    """Ids that have an answer; an unfinished last line, left by an interruption, is cut off."""
    done: set[str] = set()
    if not target.exists():
        return done
    whole_bytes = 0
    try:
        with target.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(json.loads(line)["custom_id"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{target} line {number} is not an answer of a batch; name another file"
                    ) from error
                whole_bytes += len(line)
        with target.open("r+b") as file:
            file.truncate(whole_bytes)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror or error}") from error
    return done
