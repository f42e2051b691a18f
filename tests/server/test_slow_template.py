"""A template that takes long keeps nobody else waiting, however short the requests are."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.server.state import ServedModel


class SlowParrot(ParrotServer):
    """Its template waits for the gate, and is known to be slow once it has been used."""

    def _load(self) -> ServedModel:
        from dataclasses import replace

        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        return replace(super()._load(), encode_chat=self._encode_chat, is_chat_slow=lambda: bool(self.threads))

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], *_options: Any) -> list[int]:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(60)
        return list(messages[0]["content"].encode())


def test_a_slow_template_holds_nobody_up_twice() -> None:
    with SlowParrot() as server:
        assert server.chat("a")[0] == 200
        assert not server.threads[0].startswith("everystop-prepare"), "nobody could know"
        server.gate.clear()
        asking = threading.Thread(target=server.chat, args=("b",))
        asking.start()
        wait_until(lambda: len(server.threads) == 2)
        assert server.get("/health")[0] == 200
        server.gate.set()
        asking.join()
        assert server.threads[1].startswith("everystop-prepare")


def test_an_ordinary_template_runs_where_the_request_was_read() -> None:
    with parrot() as server:
        assert not server.service.state.model.is_chat_slow()
