"""Starts the server of this checkout for a measurement, reads its counters, and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-P", "-m", "everystop", "serve")
START_TIMEOUT_S = 120.0
MARK = "Serving on "


def child_environment() -> dict[str, str]:
    """This process's environment, but bytecode is kept: an installed server has its own, too."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def read_counters(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format by name, without our prefix, `_total` and labels; buckets are left out."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("everystop_") and "_bucket{" not in line:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("everystop_").removesuffix("_total")
            counters[name] = counters.get(name, 0.0) + float(value)
    return counters


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What was counted between two looks."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


class LocalServer:
    """A context: a server on a free port, ready when the block is entered, ended when it is left.

    `options` are flags of `serve`. Raises SystemExit with the server's own words when it does not start. Once it is
    left, `exit_code` and `last_words` say how the server ended.
    """

    def __init__(self, model: str, options: Sequence[str] = (), command: Sequence[str] = COMMAND) -> None:
        self._command = [*command, model, "--port", "0", *options]
        self._process: subprocess.Popen[str]
        self._errors: IO[bytes]
        self.url = ""
        self.screen: list[str] = []
        self.exit_code: int | None = None
        self.last_words = ""

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that ending this process ends the server, too
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT, env=child_environment()
        )
        guard = threading.Timer(START_TIMEOUT_S, self._process.kill)
        guard.start()
        self._read_screen()
        guard.cancel()
        if not self.url:
            self._process.wait()
            raise SystemExit(f"the server did not start: {self.words()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.exit_code, self.last_words = self._process.returncode, self.words()
        self._errors.close()

    def _read_screen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.screen.append(line.rstrip())
            if MARK in line:
                self.url = line.partition(MARK)[2].split()[0]
                return

    def words(self) -> str:
        """What the server has said on its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor time that the server has taken so far, all threads together."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def counters(self) -> dict[str, float]:
        """Every sample of /metrics without labels of its own, by its name without prefix."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return read_counters(answer.read().decode())

    def wait_idle(self, timeout_s: float = 10.0) -> dict[str, float]:
        """The counters once nothing runs or waits."""
        end_s = time.monotonic() + timeout_s
        while True:
            counters = self.counters()
            if not counters["num_requests_running"] + counters["num_requests_waiting"] or time.monotonic() > end_s:
                return counters
            time.sleep(0.02)
