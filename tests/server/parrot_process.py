"""The parrot server in a process of its own, with a real log, real signals and real ends.

SIGUSR1 makes the engine's next step raise, SIGUSR2 makes it sleep until the next SIGUSR2.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.server.parrot import ParrotServer, wait_until

from everystop.core.policy import PolicySettings
from everystop.observe.recorder import Recorder
from everystop.server.crash_file import CrashFiles
from everystop.server.logs import Log, install
from everystop.server.tls import Certificate

ROOT = Path(__file__).parents[2]
END_S = 60.0


class ParrotProcess:
    """A running process; ends with the context. `log` are its lines on standard error so far."""

    def __init__(self, *, stderr: int | None = None, environment: Mapping[str, str] | None = None, **options: Any):
        command = [sys.executable, "-m", "tests.server.parrot_process", json.dumps(options)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **(environment or {})},
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line.rstrip("\n"))

    def __enter__(self) -> ParrotProcess:
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline() or 0)
        assert self.port, self.log
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_S)
        self._reader.join(END_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def join(self) -> int:
        """The exit code; the log is complete then."""
        code = self.process.wait(END_S)
        self._reader.join(END_S)
        return code

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_S)

    def get(self, path: str) -> tuple[int, bytes]:
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def complete(self, prompt: str, **fields: Any) -> tuple[int, Any]:
        with closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, **fields}))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def waits_for(self, num_running: int, num_waiting: int) -> None:
        def counts() -> tuple[float, float]:
            lines = self.get("/metrics")[1].decode().splitlines()
            values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
            return (values["everystop_num_requests_running"], values["everystop_num_requests_waiting"])

        wait_until(lambda: counts() == (num_running, num_waiting))


def main() -> int:
    options = json.loads(sys.argv[1])
    log = Log(options.pop("log_format", "text"))
    install(log)
    if "max_file_bytes" in options:
        limit = options.pop("max_file_bytes")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if "max_files" in options:
        limit = options.pop("max_files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if "record" in options:
        options["recorder"] = Recorder(Path(options.pop("record")), "continuous", PolicySettings())
    if "crash_dir" in options:
        options["crash_files"] = CrashFiles(Path(options.pop("crash_dir")), 3, {"port": 0})
    if "tls" in options:
        options["tls"] = Certificate(*options.pop("tls"))
    step_s = options.pop("step_s", 0.005)
    gate = threading.Event()
    gate.set()

    def fail(plan: object) -> None:
        raise RuntimeError("the roof is on fire")

    def toggle(*_: object) -> None:
        (gate.clear if gate.is_set() else gate.set)()

    server = ParrotServer(
        say=log.say, log_request=log.say, on_ready=lambda model: print(server.port, flush=True), **options
    )
    server.runner.step_s = step_s
    server.runner.before_step = lambda plan: (gate.wait(END_S), None)[1]
    signal.signal(signal.SIGUSR1, lambda *_: setattr(server.runner, "before_step", fail))
    signal.signal(signal.SIGUSR2, toggle)
    try:
        return server.run_here()
    finally:
        log.close()


if __name__ == "__main__":
    sys.exit(main())
