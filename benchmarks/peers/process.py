"""`ServerProcess`: a peer's server as a process of ours: started, waited for, watched, and ended by its process id."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.environment import tail
from benchmarks.peers.peer import Launch, PeerError

HOST = "127.0.0.1"
POLL_S = 0.1
END_TIMEOUT_S = 30.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A context: the server is ready when the block is entered, and gone, with all its children, when it is left.

    Raises PeerError with the end of its log where it does not get ready.
    """

    def __init__(self, launch: Launch, port: int, log: Path) -> None:
        self._launch, self._port, self._log = launch, port, log
        self.url = f"http://{HOST}:{port}"
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        with self._log.open("ab") as file:
            file.write(f"\n$ {' '.join(self._launch.command)}\n".encode())
            file.flush()
            try:
                self._process = subprocess.Popen(
                    self._launch.command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=os.environ | self._launch.environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"{self._launch.command[0]} cannot be run: {error.strerror}") from error
        try:
            self._wait_until_ready(began_s + self._launch.start_timeout_s)
        except BaseException:
            self._end()
            raise
        self.start_s = time.monotonic() - began_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """The process that was started."""
        assert self._process is not None
        return self._process.pid

    def _wait_until_ready(self, end_s: float) -> None:
        assert self._process is not None
        while self._get(self._launch.ready_path) is None:
            if (code := self._process.poll()) is not None:
                raise PeerError(
                    f"the server ended with {code} before it was ready; the end of its log:\n{self.words()}"
                )
            if time.monotonic() > end_s:
                raise PeerError(
                    f"the server was not ready after {self._launch.start_timeout_s:g} s; "
                    f"the end of its log:\n{self.words()}"
                )
            time.sleep(POLL_S)

    def _get(self, path: str) -> bytes | None:
        """The body of an answer with 200, else None."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return body if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def words(self) -> str:
        """The end of what the server has said."""
        return tail(self._log)

    def stats(self) -> dict[str, Any]:
        """The server's own figures, where it has a page of them."""
        if self._launch.stats_path is None or (body := self._get(self._launch.stats_path)) is None:
            return {}
        found = json.loads(body)
        return found if isinstance(found, dict) else {}

    def cpu_s(self) -> float:
        """Processor time that the server and its children have taken so far."""
        return sum(_cpu_ticks(pid) for pid in self.members()) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        """Sum of the largest resident sizes of the server's processes."""
        return sum(_status_kb(pid, "VmHWM") for pid in self.members()) * 1024

    def members(self) -> list[int]:
        """The processes of the session that was started for it."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == self.pid]

    def _end(self) -> None:
        """Ask, wait, then kill whatever of its session is left."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, or none where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _session(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[3]) if fields else -1


def _cpu_ticks(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _status_kb(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def busy_s() -> float:
    """Processor time that everybody on this machine has taken since it started; steal counts, idling does not."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
