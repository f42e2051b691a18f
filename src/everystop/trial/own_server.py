"""A server in a process of its own: starts it, asks for its counters and its processor time, ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from everystop.trial.interrupts import ended_in_order
from everystop.trial.server_process import SERVE, ServerFailed, ServerProcess

ASK_TIMEOUT_S = 30.0
Counters = dict[tuple[str, str], float]
"""Samples by name and by the text of their labels."""


class Thread(NamedTuple):
    """One thread of a process: its name, and the processor time that it has taken, the system's for it included."""

    name: str
    cpu_ns: int


class OwnServer:
    """A context: `everystop serve` with `options`, on a free port; it serves when the block is entered and has ended
    when it is left. Raises ServerFailed with the server's own words where it does not start.
    """

    def __init__(self, options: Sequence[str], command: Sequence[str] = SERVE) -> None:
        self._command = command
        self._options = [*options, "--port", "0", "--stats-interval", "0"]
        self._process: ServerProcess
        self._open = ExitStack()
        self.url = ""

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.enter_context(ended_in_order())
            folder = Path(opening.enter_context(TemporaryDirectory(prefix="everystop-server-")))
            self._process = opening.enter_context(ServerProcess(self._options, folder, self._command))
            self.url = self._process.url()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

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
            raise ServerFailed(f"the server does not answer any more ({error}){self._process.last_words()}") from error
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
