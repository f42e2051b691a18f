"""How long clients and supervisors wait when the engine's thread is killed: python -m benchmarks.recovery

A real server with the embedded model serves streams; then an asynchronous SystemExit is raised in its engine's thread.
Measured are the times from then to the last client's error, to the end of the process, and, with a supervisor that
starts it again at once, to the first token of a new process. Medians of the repeats, with the extremes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
KILLABLE = """
import ctypes, signal, sys, threading
from everystop.cli import main

def kill(*_):
    [engine] = [thread for thread in threading.enumerate() if thread.name == "everystop-engine"]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine.ident), ctypes.py_object(SystemExit))

signal.signal(signal.SIGUSR1, kill)
sys.exit(main(sys.argv[1:]))
"""
STREAMS = 8
WAIT_S = 60.0


class Server:
    """A server whose engine's thread SIGUSR1 kills."""

    def __init__(self, crash_dir: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", KILLABLE, "serve", "--port", "0", "--crash-dir", crash_dir],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Serving on http://"):
                self.netloc = line.split()[2].removeprefix("http://")
                return
        raise SystemExit("the server did not start")

    def first_token(self) -> None:
        stream(self.netloc, lambda line: True)


def stream(netloc: str, is_enough: object) -> list[bytes]:
    """The lines of a stream until one is enough, or to its end."""
    connection = http.client.HTTPConnection(netloc, timeout=WAIT_S)
    body = json.dumps({"prompt": "Once upon a time", "ignore_eos": True, "stream": True, "max_tokens": 4000})
    connection.request("POST", "/v1/completions", body)
    answer, lines = connection.getresponse(), []
    while line := answer.readline():
        lines.append(line)
        if callable(is_enough) and is_enough(line):
            break
    connection.close()
    return lines


def measure(crash_dir: str) -> tuple[float, float, float]:
    """Milliseconds to the last client's error, to the end of the process, to a first token of the next one."""
    server = Server(crash_dir)
    ends_s: list[float] = []
    running = threading.Barrier(STREAMS + 1)

    def ride() -> None:
        seen = 0

        def look(_: bytes) -> bool:
            nonlocal seen
            seen += 1
            if seen == 6:
                running.wait(WAIT_S)
            return False

        lines = stream(server.netloc, look)
        ends_s.append(time.monotonic())
        assert any(b"engine_failed" in line for line in lines[-4:]), lines[-4:]

    threads = [threading.Thread(target=ride) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    running.wait(WAIT_S)
    killed_s = time.monotonic()
    os.kill(server.process.pid, 10)
    code = server.process.wait(WAIT_S)
    ended_s = time.monotonic()
    for thread in threads:
        thread.join(WAIT_S)
    assert code == 1, code
    again = Server(crash_dir)
    again.first_token()
    back_s = time.monotonic()
    again.process.terminate()
    again.process.wait(WAIT_S)
    return tuple(1000 * (at_s - killed_s) for at_s in (max(ends_s), ended_s, back_s))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(folder) for _ in range(repeats)]
    names = (f"the last of {STREAMS} clients has its error", "the process has ended", "a new one has sent a token")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name}: {statistics.median(column):.0f} ms ({min(column):.0f} to {max(column):.0f}), n = {repeats}")


if __name__ == "__main__":
    main()
