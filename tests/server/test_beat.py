"""Who was just turned away is heard again at the end of the beat, all at once."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until
from tests.server.test_tls import CERT, KEY, TlsParrot

from everystop.server import beat
from everystop.server.beat import Beat
from everystop.server.tls import Certificate


class Connection:
    """Notes whether it is read."""

    def __init__(self, told: list[str], name: str) -> None:
        self._told = told
        self._name = name

    def pause_reading(self) -> None:
        self._told.append(f"pause {self._name}")

    def resume_reading(self) -> None:
        self._told.append(f"resume {self._name}")


def test_all_are_heard_again_at_the_end_of_the_beat_that_the_first_began(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ends: list[object] = []

    async def run() -> None:
        loop, one = asyncio.get_running_loop(), Beat()
        monkeypatch.setattr(loop, "call_later", lambda delay_s, end: ends.append((delay_s, end)))
        for name in "abc":
            one.leave(Connection(told, name))
        [(delay_s, end)] = ends
        assert delay_s == beat.BEAT_S
        end()
        one.leave(Connection(told, "d"))
        assert len(ends) == 2, "a new beat begins"

    asyncio.run(run())
    assert told == ["pause a", "pause b", "pause c", "resume a", "resume b", "resume c", "pause d"]


def test_a_client_that_sends_at_once_again_is_answered_after_the_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is answered meanwhile."""
    is_over, key = threading.Event(), {"authorization": "Bearer sk"}
    with parrot(api_keys=["sk"]) as server, closing(server.connect()) as one, closing(server.connect()) as other:
        its_beat = server.service._http.config.beat
        monkeypatch.setattr(its_beat, "_end", is_over.set)
        one.request("GET", "/v1/models")
        assert one.getresponse().read()
        assert is_over.wait(10)
        one.request("GET", "/version", headers=key)
        other.request("GET", "/version", headers=key)
        assert json.loads(other.getresponse().read())["version"]
        assert one.sock is not None
        one.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.sock.recv(1)
        one.sock.settimeout(10)
        server.loop.call_soon_threadsafe(Beat._end, its_beat)
        assert one.sock.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("is_secure", [False, True])
@pytest.mark.parametrize("end", ["abort", "close"])
def test_one_that_is_cut_off_before_the_end_keeps_nobody_unheard(
    end: str, is_secure: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key, secured = {"authorization": "Bearer sk"}, {"tls": Certificate(CERT, KEY)} if is_secure else {}
    made = (TlsParrot if is_secure else ParrotServer)(api_keys=["sk"], **secured)
    with made as server, closing(server.connect()) as one, closing(server.connect()) as other:
        its_beat = server.service._http.config.beat
        monkeypatch.setattr(its_beat, "_end", lambda: None)
        for connection in (one, other):
            connection.request("GET", "/v1/models")
            assert connection.getresponse().read()
        wait_until(lambda: len(its_beat._waiting) == 2)
        first = its_beat._waiting[0]._transport
        server.loop.call_soon_threadsafe(getattr(first, end))
        server.let_tick(1)
        server.loop.call_soon_threadsafe(Beat._end, its_beat)
        other.request("GET", "/version", headers=key)
        assert other.getresponse().status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
