"""What systemd is told, and when."""

from __future__ import annotations

import select
import signal
import socket
from pathlib import Path

import pytest
from tests.server.parrot import wait_until
from tests.server.parrot_process import ParrotProcess

from everystop.server.supervisor import Supervisor


def test_ready_alive_and_stopping_are_told(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(address)
        supervisor.settimeout(60)
        with ParrotProcess(environment={"NOTIFY_SOCKET": address}, stall_timeout=1.0) as server:
            told = []
            while told.count("WATCHDOG=1") < 2 or "READY=1" not in told:
                told.append(supervisor.recv(100).decode())
            server.signal(signal.SIGTERM)
            while told[-1] != "STOPPING=1":  # of what nobody takes only a little is kept
                told.append(supervisor.recv(100).decode())
            assert server.join() == 0
    assert set(told) == {"READY=1", "WATCHDOG=1", "STOPPING=1"}


def test_a_stalled_engine_is_not_told_to_be_alive(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(address)
        supervisor.settimeout(60)
        with ParrotProcess(environment={"NOTIFY_SOCKET": address}, stall_timeout=1.0) as server:
            server.signal(signal.SIGUSR2)
            assert server.complete("abc")[0] == 503

            def is_silent() -> bool:
                """No word in six beats; one that stood still counts anew, and is alive meanwhile."""
                wait_until(lambda: server.get("/health/live")[0] == 503)
                while select.select([supervisor], [], [], 0)[0]:
                    supervisor.recv(100)
                return not select.select([supervisor], [], [], 1.5)[0]

            wait_until(is_silent)
            server.signal(signal.SIGUSR2)
            supervisor.settimeout(60)
            assert supervisor.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("address", ["", "/no/such/socket", "@no-such-abstract-socket"])
def test_where_nobody_listens_nothing_happens(address: str) -> None:
    Supervisor({"NOTIFY_SOCKET": address} if address else {}).tell("READY=1")
