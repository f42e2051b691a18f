"""`everystop batch`: answers a file of requests through the routes and the engine of the server, without a port."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import IO, Any

from starlette.types import ASGIApp, Message

from everystop.config import Config
from everystop.core.errors import ConfigError, EngineDead, UnsupportedField
from everystop.engine.messages import StepOutput
from everystop.server.batch_files import BatchLine, open_answers, read_requests
from everystop.server.errors import error_object
from everystop.server.opening import Opening
from everystop.server.routes import make_app
from everystop.server.state import Phase, ServedModel, ServerState

RETRY_S = 0.05
OF_THE_REQUEST = frozenset({"generation_failed", "request_timeout"})  # of 500 and more: another run would end the same


def run_batch(config: Config, source: Path, target: Path) -> int:
    """Answer the requests of `source` that `target` has no answer for; returns the exit code.

    Each line of `source` is `{"custom_id", "method": "POST", "url", "body"}`; each line of `target` gets
    `{"custom_id", "response": {"status_code", "body"}, "error"}`, in the order in which they end, written and flushed
    one by one. What fails for a reason of its own, such as its `timeout`, is answered by its error; what the server is
    to blame for is left out, and returns 1. A run that was interrupted, even inside a line, goes on where it stopped.
    Raises ConfigError for a file that cannot be read or written, naming the line.
    """
    num_lines = sum(1 for _ in read_requests(source))
    try:
        with open_answers(target, source) as (out, done):
            return asyncio.run(_Batch(Opening(config).load(), out).run(source, done, num_lines))
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
        self._state = ServerState(is_counted=False)
        self._app: ASGIApp = make_app(self._state)
        self._num_answered = 0
        self._num_errors = 0
        self._num_failed = 0

    async def run(self, source: Path, done: set[str], num_lines: int) -> int:
        loop, engine = asyncio.get_running_loop(), self._model.engine
        self._state.open(self._model)
        board = self._state.board

        def deliver(outputs: list[StepOutput]) -> None:
            loop.call_soon_threadsafe(board.deliver, outputs)

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        engine.on_outputs, engine.on_events, engine.on_failure = deliver, board.queue.receive, fail
        engine.start()
        room = asyncio.Semaphore(min(256, max(1, board.queue.max_num_held // 4)))
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in read_requests(source):
                    if line.custom_id not in done:
                        await room.acquire()
                        tasks.create_task(self._answer(line, room))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await asyncio.to_thread(engine.stop)
        skipped = f", {len(done):,} were already there" if done else ""
        failed = f", {self._num_failed:,} failed: run the same command again" if self._num_failed else ""
        answered = f"{self._num_answered:,} of {num_lines:,} requests answered, {self._num_errors:,} with an error"
        print(answered + skipped + failed, file=sys.stderr)
        return 1 if self._num_failed or self._state.phase is Phase.FAILED else 0

    def _fail(self, error: BaseException) -> None:
        self._state.phase = Phase.FAILED
        self._state.board.fail_all(EngineDead(f"the engine has failed: {error}"))

    async def _answer(self, line: BatchLine, room: asyncio.Semaphore) -> None:
        try:
            status, body = await self._post(line)
            while status == 429:  # its choices are too many for the queue as it stands
                await asyncio.sleep(RETRY_S)
                status, body = await self._post(line)
        finally:
            room.release()
        if status >= 500 and body["error"]["code"] not in OF_THE_REQUEST:
            self._num_failed += 1
            return  # our failure, not the request's: the next run tries again
        self._num_answered += status < 400
        self._num_errors += status >= 400
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
            return 400, error_object(UnsupportedField("stream", message))
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
            "headers": [(b"host", b"batch"), (b"content-type", b"application/json")],
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

        try:
            await self._app(scope, receive, send)
        except Exception:  # unforeseen: it is answered by 500, logged, and raised once more
            if not received:
                raise
        answer: dict[str, Any] = json.loads(bytes(received))
        return status, answer
