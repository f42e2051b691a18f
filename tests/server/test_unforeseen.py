"""What nobody foresaw: one answer that names the request, and one line of the log that names it too."""

from __future__ import annotations

import http.client
import json
import logging
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, wait_until

from everystop.server.state import ServerState
from everystop.server.streams import Reply, StreamReply

COMPLETIONS = "/v1/completions"


def explode(*args: object, **named: object) -> Any:
    raise ValueError("secret at 0x7f001234")


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("given", ["", "job-7"])
@pytest.mark.parametrize(
    ("method", "path", "body", "owner", "what"),
    [
        ("POST", COMPLETIONS, {"prompt": "ab"}, "board", "open"),
        ("POST", "/generate", {"inputs": "ab"}, "board", "open"),
        ("POST", COMPLETIONS, {"prompt": "ab"}, Reply, "_send"),
        ("GET", "/health", None, ServerState, "health"),
        ("GET", "/v1/requests/1", None, "history", "catch_up"),
    ],
)
def test_a_500_carries_an_id_which_its_one_line_names(
    server: ParrotServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: str,
    method: str,
    path: str,
    body: object,
    owner: Any,
    what: str,
) -> None:
    state = server.service.state
    with monkeypatch.context() as patch:
        if owner is Reply:
            patch.setattr("everystop.server.streams.WholeReply._send", explode)
        else:
            patch.setattr(getattr(state, owner) if isinstance(owner, str) else owner, what, explode)
        status, headers, answer = server.request(method, path, body, {"x-request-id": given} if given else {})
    assert (status, b"secret" in answer) == (500, False)
    name = headers["x-request-id"]
    assert not given or name == given
    [line] = [line for line in errors_of(caplog) if "could not be counted" not in line]
    assert line.startswith("unforeseen error in request ")
    assert name in line


def test_one_inside_an_answer_ends_the_connection_and_is_one_line_too(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("everystop.server.live.LiveStreams.cpu_share", explode)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            server.get("/ui/stream", {"x-request-id": "look-1"})
        wait_until(lambda: bool(errors_of(caplog)))
    server.let_tick(2)
    assert errors_of(caplog) == ["unforeseen error in request look-1"]


def test_one_inside_a_stream_is_an_event_and_names_both_ids(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StreamReply, "_attach_times", explode)
        body = {"prompt": "ab", "stream": True}
        _, headers, answer = server.request("POST", COMPLETIONS, body, {"x-request-id": "job-8"})
    events = answer.decode().split("\n\n")
    name = json.loads(events[0].removeprefix("data: "))["id"]
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "server_error"
    assert errors_of(caplog) == [f"unforeseen error in request {name} (job-8)"]
    assert headers["x-request-id"] == "job-8"


def test_one_in_an_errors_own_answer_is_a_500_as_well(
    server: ParrotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("everystop.server.errors._served", explode)
        status, headers, _ = server.request("GET", "/nothing")
    assert status == 500
    assert errors_of(caplog) == [f"unforeseen error in request {headers['x-request-id']}"]
