"""Servers as processes: waited for, watched, and ended with all that they started."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from benchmarks.peers.peer import Crowd, Launch, PeerError, Place, Setting
from benchmarks.peers.process import ServerProcess, busy_s, free_port
from tests.benchmarks.peers.fake import FakePeer
from tests.server.parrot import wait_until

CROWD = Crowd(num_clients=1)


def fake_launch(port: int, setting: str = "good") -> Launch:
    return FakePeer().launch(Place(Path()), Setting(setting), CROWD, port)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_is_ready_in_the_block_and_gone_behind_it(tmp_path: Path) -> None:
    port = free_port()
    with ServerProcess(fake_launch(port), port, tmp_path / "logs" / "log") as server:
        assert is_listening(port)
        assert server.start_s > 0
        assert server.stats() == {"steps": 0, "step_s": 0.0, "front_s": 0.0}
        assert 0 < server.cpu_s() <= busy_s()
        assert server.peak_bytes() > 1 << 20
        assert server.members() == [server.pid]
    assert not is_listening(port)


def test_children_that_outlive_the_server_are_ended_too(tmp_path: Path) -> None:
    port = free_port()
    launch = fake_launch(port)
    through_a_shell = Launch(
        command=("sh", "-c", f"{' '.join(launch.command)} & wait"), environment=launch.environment, start_timeout_s=60
    )
    with ServerProcess(through_a_shell, port, tmp_path / "log") as server:
        assert len(server.members()) == 2
    wait_until(lambda: not is_listening(port))


def test_a_server_that_does_not_start_tells_why(tmp_path: Path) -> None:
    port = free_port()
    with (
        pytest.raises(PeerError, match=r"(?s)ended with 1 before it was ready.*no such thing as a working fake"),
        ServerProcess(fake_launch(port, "broken"), port, tmp_path / "log"),
    ):
        pytest.fail("it is not ready")


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    sleeper = Launch(command=(sys.executable, "-c", "import time; time.sleep(600)"), start_timeout_s=0.2)
    server = ServerProcess(sleeper, free_port(), tmp_path / "log")
    with pytest.raises(PeerError, match=r"not ready after 0\.2 s"):
        server.__enter__()
    assert server.members() == []


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="/no/such/program cannot be run"):
        ServerProcess(Launch(command=("/no/such/program",)), free_port(), tmp_path / "log").__enter__()
