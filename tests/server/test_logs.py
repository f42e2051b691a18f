"""One log: its formats, what it never shows, and that nobody waits for it."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.server.parrot import wait_until

from everystop.core.errors import ConfigError
from everystop.server.logs import MAX_WAITING_LINES, LineWriter, Log, LogHandler, exception_fields, install

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Sink:
    """Takes lines, fails, or waits."""

    def __init__(self) -> None:
        self.data = b""
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def write(self, data: bytes) -> None:
        assert self.gate.wait(60), "a test forgot to open the gate, or waited for what is written"
        if self.error is not None:
            raise self.error
        self.data += data

    @property
    def lines(self) -> list[str]:
        return self.data.decode().splitlines()


def said(log_format: str, tell: Callable[[Log], None], level: str = "info") -> list[str]:
    sink = Sink()
    log = Log(log_format, level, write=sink.write)
    tell(log)
    log._writer.close(60)  # a busy machine may need longer than a server waits
    return sink.lines


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.raiseExceptions
    hooks = sys.excepthook, threading.excepthook
    yield
    root.handlers[:], root.level, logging.raiseExceptions = before
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)


def test_text_has_a_time_a_level_and_fields_that_can_be_told_apart() -> None:
    fields = {"id": "cmpl-1", "tenant": 'a "b"\n=c', "ms": 1.5, "ok": True, "nothing": None}
    [line] = said("text", lambda log: log.say("request", fields))
    assert re.fullmatch(STAMP + r' info    request id=cmpl-1 tenant="a \\"b\\"\\n=c" ms=1.5 ok=true nothing=null', line)


def test_json_is_one_object_a_line() -> None:
    [line] = said("json", lambda log: log.say("a\nb", {"tenant": "ü\u2028", "n": 1}, source="x"))
    told = json.loads(line)
    assert re.fullmatch(STAMP, told.pop("time"))
    assert told == {"level": "info", "source": "x", "message": "a\nb", "tenant": "ü\u2028", "n": 1}
    assert line.isascii()


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x1b[2Jb", "a\u2028b", "a\x85b", "\u202eab"])
def test_a_message_can_make_no_second_line_and_move_no_cursor(text: str) -> None:
    [line] = said("text", lambda log: log.say(text, {"x": text}))
    assert line.isprintable()


def test_what_is_below_the_level_is_left_out() -> None:
    def tell(log: Log) -> None:
        log.say("request")
        log.say("careful", level=logging.WARNING)

    assert [line.split()[2] for line in said("text", tell, "warning")] == ["careful"]


def quoting() -> Exception:
    try:
        try:
            raise KeyError("a secret prompt")
        except KeyError as error:
            raise ValueError("cannot read 'a secret prompt'") from error
    except ValueError as error:
        return error


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_shows_where_and_what_but_quotes_no_request(log_format: str) -> None:
    def tell(log: Log) -> None:
        install(log)
        logging.getLogger("everystop.server.errors").error("unforeseen error", exc_info=quoting())

    text = "\n".join(said(log_format, tell))
    assert "secret" not in text
    assert "ValueError" in text
    assert "after KeyError" in text
    assert text.count("test_logs.py:") == 2


def test_named_errors_and_those_of_the_system_keep_their_message() -> None:
    for error in (ConfigError("lower --port"), OSError(28, "No space left on device")):
        assert str(error) in exception_fields(error, trusts=False)["error"]
    assert "secret" in exception_fields(quoting(), trusts=True)["error"]


@pytest.mark.usefixtures("restored_logging")
def test_libraries_threads_and_warnings_come_the_same_way() -> None:
    def tell(log: Log) -> None:
        install(log)
        logging.getLogger("uvicorn.error").info("Started server process")
        logging.getLogger("uvicorn.error").warning("a library says")
        logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task 'a secret prompt'>")
        logging.getLogger("py.warnings").warning("deprecated")
        thread = threading.Thread(target=lambda: [][1])
        thread.start()
        thread.join()

    lines = [json.loads(line) for line in said("json", tell)]
    assert [line["message"] for line in lines] == [
        "a library says", "Task exception was never retrieved", "deprecated", "nobody caught an error",
    ]  # fmt: skip
    assert lines[-1]["error"].startswith("IndexError: ")


def test_a_record_that_cannot_be_formatted_raises_nothing() -> None:
    def tell(log: Log) -> None:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "%d and %d", ("one",), None)
        LogHandler(log).emit(record)

    [line] = said("text", tell)
    assert "could not be made" in line


def test_a_reader_that_stops_costs_lines_and_no_time() -> None:
    sink = Sink()
    sink.gate.clear()
    writer = LineWriter(sink.write, lambda num: f"lost {num}")
    for i in range(3 * MAX_WAITING_LINES):
        writer.put(str(i))
    assert not sink.lines, "whoever logs waited for the reader"
    sink.gate.set()
    writer.close(60)
    lost = [int(line.split()[1]) for line in sink.lines if line.startswith("lost")]
    assert len(sink.lines) - len(lost) + sum(lost) == 3 * MAX_WAITING_LINES
    assert sum(lost) >= MAX_WAITING_LINES - 1
    kept = [int(line) for line in sink.lines if not line.startswith("lost")]
    assert kept == sorted(kept)


def test_lines_lost_on_a_full_disk_are_counted_and_told_when_there_is_room_again() -> None:
    sink = Sink()
    writer = LineWriter(sink.write, lambda num: f"lost {num}")
    sink.error = OSError(28, "No space left on device")
    for i in range(5):
        writer.put(f"line {i}")
        wait_until(lambda n=i: writer._num_lost == n + 1)  # type: ignore[misc]
    sink.error = None
    writer.put("again")
    writer.close(60)
    assert sink.lines == ["again", "lost 5"]


def test_closing_waits_no_longer_than_it_may() -> None:
    sink = Sink()
    sink.gate.clear()
    log = Log(write=sink.write)
    log.say("x")
    log.close()
    assert not sink.lines, "closing waited for the reader"
    sink.gate.set()


def test_extra_fields_of_any_kind_can_be_written() -> None:
    things: dict[str, Any] = {"path": object(), "list": ["a", "b\nc"]}
    for log_format in ("text", "json"):
        assert said(log_format, lambda log: log.say("x", things))
    assert said("text", lambda log: log.say("x", {"stack": ["a", "b\nc"]}))[1:] == ["    a", "    b\\nc"]
