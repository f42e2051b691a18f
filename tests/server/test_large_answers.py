"""Answers in one piece that take long to write: nobody else waits for that."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.server.parrot import ParrotServer

from everystop.server import streams
from everystop.server.replies import ChatWriter, CompletionWriter
from everystop.server.tgi_replies import TgiWriter

MESSAGES = [{"role": "user", "content": "abcdef"}]


@pytest.mark.parametrize(
    ("path", "body", "writer"),
    [
        ("/v1/completions", {"prompt": "abcdef", "logprobs": 5}, CompletionWriter),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}, ChatWriter),
        ("/generate", {"inputs": "abcdef", "parameters": {"details": True, "top_n_tokens": 5}}, TgiWriter),
    ],
)
@pytest.mark.parametrize("most", [10, 1000])
def test_many_log_probabilities_are_written_beside_the_event_loop(
    server: ParrotServer, path: str, body: Any, writer: type[Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tokens and the end, each with five others, are between 10 and 1,000."""
    whole, threads = writer.whole, []

    def write(own: Any, texts: Sequence[Any], reasons: Sequence[str], usage: dict[str, Any]) -> bytes:
        threads.append(threading.current_thread())
        return whole(own, texts, reasons, usage)  # type: ignore[no-any-return]

    monkeypatch.setattr(writer, "whole", write)
    monkeypatch.setattr(streams, "LARGE_ENTRIES", most)
    assert server.post(path, body)[0] == 200
    [thread] = threads
    assert (thread is server._thread) == (most == 1000)
