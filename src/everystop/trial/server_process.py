"""`everystop serve` as a process of its own on this machine: started, watched, and ended by whoever started it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from everystop.config import Config
from everystop.core.errors import EverystopError

SERVE = (sys.executable, "-P", "-m", "everystop", "serve")
START_S, END_S, POLL_S = 600.0, 60.0, 0.01
NUM_LAST_LINES = 3
PREFIX = "EVERYSTOP_"
KEPT = ("EVERYSTOP_HOME", "EVERYSTOP_ISA")  # of our variables; all others are settings, and those are given as flags


class ServerFailed(EverystopError):
    """A server that did not start, has ended by itself, or would not end; the message has its last words."""


class ServerProcess:
    """A server of these options, which should take a free port; `with` ends it, gently unless something was raised.

    `folder` gets what it prints and logs, and `variables` are its environment. Ctrl-C in a terminal does not reach it.
    """

    def __init__(
        self,
        options: Sequence[str],
        folder: Path,
        command: Sequence[str] = SERVE,
        variables: Mapping[str, str] = os.environ,
    ) -> None:
        self._words = [*command, *options]
        self._variables = variables
        self._screen, self._log = folder / "screen.txt", folder / "log.txt"
        self._process: subprocess.Popen[bytes]
        self._url: str | None = None
        self._is_asked = False

    def __enter__(self) -> ServerProcess:
        with self._screen.open("wb") as screen, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=log,
                env=self._variables,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
            return
        if not self._is_asked:
            self.check()
            self.ask_to_end()
        try:
            code = self._process.wait(END_S)
        except BaseException as failure:
            self._kill()
            if not isinstance(failure, subprocess.TimeoutExpired):
                raise
            raise ServerFailed(f"the server did not end within {END_S:g} s{self.last_words()}") from None
        if code:
            raise ServerFailed(f"the server ended with {_in_words(code)}{self.last_words()}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def url(self) -> str:
        """Where it serves, once it does; raises ServerFailed."""
        deadline_s = time.monotonic() + START_S
        while self._url is None:
            found = re.search(rb"^Serving on (\S+)", self._screen.read_bytes(), re.MULTILINE)
            if found is not None:
                self._url = found[1].decode()
                break
            self.check()
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"the server did not serve within {START_S:g} s{self.last_words()}")
            time.sleep(POLL_S)
        return self._url

    def check(self, patience_s: float = 0.0) -> None:
        """Raise ServerFailed if it has ended, or does so within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(patience_s)
            raise ServerFailed(f"the server ended by itself with {_in_words(code)}{self.last_words()}")

    def ask_to_end(self) -> None:
        """Have it finish what it has accepted, and end; the end of `with` waits for that."""
        self._is_asked = True
        self._process.terminate()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """The end of its log behind a colon; nothing where it has said nothing."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LAST_LINES:]
        return f": {' / '.join(line.strip() for line in lines)}" if lines else ""


def command_line(config: Config) -> list[str]:
    """The words behind `serve` that make this configuration: the model, and a flag for all that is no default."""
    words = [config.model]
    for setting in fields(config):
        value = getattr(config, setting.name)
        if "flag" in setting.metadata and value != setting.default:
            assert not setting.metadata["is_secret"], "a secret does not stand in a list of processes"
            words += _flag(setting.metadata["flag"], value)
    return words


def _flag(flag: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag.removeprefix('--')}"
    else:
        yield from (f"{flag}={each}" for each in (value if isinstance(value, tuple) else (value,)))


def without_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Without those that would set what no flag sets."""
    return {name: value for name, value in variables.items() if not name.startswith(PREFIX) or name in KEPT}


def _in_words(code: int) -> str:
    return f"status {code}" if code >= 0 else signal.Signals(-code).name
