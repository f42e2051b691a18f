"""A server in a process of its own: starts it, asks for its counters and its processor time, ends it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self
from urllib.parse import urlsplit

from everystop.core.errors import EverystopError

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 30.0
MARK = "Serving on "
COMMAND = (sys.executable, "-P", "-m", "everystop", "serve")
Counters = dict[tuple[str, str], float]
"""Samples by name and by the text of their labels."""


class ServerFailed(EverystopError):
    """The server does not start, or does not answer."""


class Thread(NamedTuple):
    """One thread of a process: its name, and the processor time that it has taken, the system's for it included."""

    name: str
    cpu_ns: int


class OwnServer:
    """A context: `everystop serve` with `options`, on a free port; it serves when the block is entered and has ended
    when it is left. Raises ServerFailed with the server's own words where it does not start.
    """

    def __init__(self, options: Sequence[str], command: Sequence[str] = COMMAND) -> None:
        self._command = [*command, *options, "--port", "0", "--stats-interval", "0"]
        self._process: subprocess.Popen[str]
        self._errors: IO[bytes]
        self.url = ""

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        guard = threading.Timer(START_TIMEOUT_S, self._process.kill)
        guard.start()
        try:
            self._read_screen()
        finally:
            guard.cancel()
            if not self.url:
                self._process.kill()
                self._end()
                words = self._words()
                self._errors.close()
        if not self.url:
            raise ServerFailed(f"the server did not start: {words}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._end()
        self._errors.close()

    def _end(self) -> None:
        try:
            self._process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_screen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if MARK in line:
                self.url = line.partition(MARK)[2].split()[0]
                return

    def _words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "it said nothing"

    @property
    def pid(self) -> int:
        """Its process, and the thread of its event loop."""
        return self._process.pid

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def counters(self) -> Counters:
        """All samples of `/metrics` but the buckets of histograms, without the label of the model; ServerFailed."""
        return read_counters(self._get("/metrics"))

    def _get(self, path: str) -> str:
        connection = HTTPConnection(*self.address, timeout=ASK_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except (OSError, HTTPException) as error:
            raise ServerFailed(f"the server does not answer any more ({error}): {self._words()}") from error
        finally:
            connection.close()

    def threads(self) -> dict[int, Thread]:
        """The threads that live now, by their ids."""
        return dict(_threads_of(Path(f"/proc/{self.pid}/task")))


def _threads_of(folder: Path) -> Iterator[tuple[int, Thread]]:
    for task in folder.iterdir():
        try:
            name = (task / "comm").read_text().strip()
            cpu_ns = int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
        yield int(task.name), Thread(name, cpu_ns)


def read_counters(text: str) -> Counters:
    """The samples of Prometheus' text format, as `OwnServer.counters`."""
    counters: Counters = {}
    for line in text.splitlines():
        if line.startswith("#") or "_bucket{" in line:
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        kept = [label for label in labels.removesuffix("}").split(",") if not label.startswith("model_name=")]
        counters[name, ",".join(kept)] = float(value)
    return counters
