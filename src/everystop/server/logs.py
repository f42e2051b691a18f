"""The log of a server: every line, whoever says it, in one format on standard error, and nobody waits for the disk.

What is written here is read by people and machines that must not see what clients send: of an exception only named
errors, those of the system and the engine's own keep their message, since any other may quote a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from everystop.core.errors import EverystopError

MAX_WAITING_LINES = 10_000
CLOSE_S = 1.0
STDERR_FD = 2
TRUSTED_LOGGERS = ("everystop.engine", "everystop.recorder", "everystop.watchdog")  # they see no text of a client
_PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII without blanks, quotes and equals signs
_UNTOLD = "(not shown: it may quote a request; --log-level debug shows it)"

Fields = Mapping[str, Any]


class LineWriter:
    """Hands lines to `write` on a thread of its own, so that a reader who stops reading stops nobody.

    `put` may be called from any thread. At most 10,000 lines wait, further ones are lost, and so are those that cannot
    be written; `describe_loss` makes the line that says how many. After `close` nothing is written.
    """

    def __init__(self, write: Callable[[bytes], None], describe_loss: Callable[[int], str]) -> None:
        self._write = write
        self._describe_loss = describe_loss
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_lost = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="everystop-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Have a line written soon."""
        if self._lines.qsize() < MAX_WAITING_LINES:
            self._lines.put(line)
        else:
            self._lose(1)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits; whoever does not read it in that time goes without."""
        self._lines.put(None)
        self._thread.join(timeout_s)

    def _lose(self, num: int) -> None:
        with self._lock:
            self._num_lost += num

    def _run(self) -> None:
        is_open = True
        while is_open:
            taken = [self._lines.get()]
            while len(taken) < MAX_WAITING_LINES and not self._lines.empty():
                taken.append(self._lines.get())
            is_open = None not in taken
            self._tell([line for line in taken if line is not None])

    def _tell(self, lines: list[str]) -> None:
        with self._lock:
            num_lost, self._num_lost = self._num_lost, 0
        told = [*lines, self._describe_loss(num_lost)] if num_lost else lines
        try:
            self._write("".join([line + "\n" for line in told]).encode("utf-8", "backslashreplace"))
        except (OSError, ValueError):  # a full disk, a closed pipe
            self._lose(num_lost + len(lines))


def write_to_stderr(data: bytes) -> None:
    """Write all bytes to the descriptor itself: Python's buffers have locks that the end of the process may meet."""
    view = memoryview(data)
    while view:
        view = view[os.write(STDERR_FD, view) :]


class Log:
    """Lines with time, level, source, message and fields, as text or JSON; what is below `level` is left out.

    `say` may be called from any thread. A level is one of logging's numbers.
    """

    def __init__(
        self, log_format: str = "text", level: str = "info", *, write: Callable[[bytes], None] = write_to_stderr
    ) -> None:
        self.level: int = getattr(logging, level.upper())
        self._format = _as_json if log_format == "json" else _as_text
        self._writer = LineWriter(write, self._loss)

    def say(self, message: str, fields: Fields | None = None, *, level: int = logging.INFO, source: str = "") -> None:
        """One line."""
        if level >= self.level:
            self._writer.put(self._format(time.time(), level, source, message, fields or {}))

    def close(self) -> None:
        """Write what waits."""
        self._writer.close()

    def _loss(self, num: int) -> str:
        return self._format(time.time(), logging.WARNING, "", "lines of the log were lost", {"lines": num})


def _time_text(now_s: float) -> str:
    """UTC with milliseconds, such as 2026-11-30T06:58:22.123Z."""
    whole = int(now_s)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((now_s - whole) * 1000):03d}Z"


def _as_json(now_s: float, level: int, source: str, message: str, fields: Fields) -> str:
    head = {"time": _time_text(now_s), "level": logging.getLevelName(level).lower()}
    if source:
        head["source"] = source
    return json.dumps({**head, "message": message, **fields}, default=str)


def _as_text(now_s: float, level: int, source: str, message: str, fields: Fields) -> str:
    """The same, for reading: fields as name=value; lines of a list follow below."""
    parts = [_time_text(now_s), f"{logging.getLevelName(level).lower():<7}", _one_line(message)]
    parts += [f"{name}={_value(value)}" for name, value in fields.items() if not isinstance(value, list)]
    below = [f"    {_one_line(str(item))}" for value in fields.values() if isinstance(value, list) for item in value]
    return "\n".join([" ".join(parts), *below])


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value)
    return json.dumps(value, default=str)


def _one_line(text: str) -> str:
    """A text whose control characters, line ends of any kind among them, are written out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


class LogHandler(logging.Handler):
    """Takes what libraries and our own modules log."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """One record, its exception as fields; never raises."""
        try:
            fields: dict[str, Any] = {}
            error = record.exc_info[1] if record.exc_info else None
            if error is not None:
                trusts = record.name.startswith(TRUSTED_LOGGERS) or self._log.level <= logging.DEBUG
                fields = exception_fields(error, trusts=trusts)
            self._log.say(_message_of(record), fields, level=record.levelno, source=record.name)
        except Exception:  # a log that fails must not fail its caller
            with contextlib.suppress(Exception):
                self._log.say("a line of the log could not be made", level=logging.ERROR, source=record.name)


def _message_of(record: logging.LogRecord) -> str:
    """asyncio's messages go on, below their first line, with objects as Python shows them."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.name.startswith("asyncio") else message


def exception_fields(error: BaseException, *, trusts: bool) -> dict[str, Any]:
    """`error`, the kind and, where it cannot be a client's, the message; `stack`, the places, innermost last."""
    text = f"{type(error).__name__}: {str(error) if trusts or _is_ours(error) else _UNTOLD}"
    stack = frames_of(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        stack = [*frames_of(cause), f"and then, after {type(cause).__name__}:", *stack]
    return {"error": text, "stack": stack}


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, EverystopError | OSError | MemoryError)


def frames_of(error: BaseException) -> list[str]:
    """Where an exception came from: file, line and function, without the values."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]


def install(log: Log) -> None:
    """Have everything that anybody logs, and what nobody catches, go to `log`."""
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [LogHandler(log)]
    root.setLevel(log.level)
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "asyncio"):  # which tell of each start, end and connection
        logging.getLogger(name).setLevel(max(log.level, logging.WARNING) if log.level > logging.DEBUG else log.level)

    def take(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        log.say(
            "nobody caught an error", exception_fields(error, trusts=False), level=logging.ERROR, source="everystop"
        )

    def take_from_thread(news: threading.ExceptHookArgs) -> None:
        if news.exc_value is not None and news.exc_type is not SystemExit:
            take(news.exc_type, news.exc_value, news.exc_traceback)

    sys.excepthook = take
    threading.excepthook = take_from_thread
