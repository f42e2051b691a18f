"""What a body may be by its headers: JSON in UTF-8, as it is, and said once."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until
from tests.server.test_wire import ask

from everystop.server.bodies import MAX_BODY_BYTES

PATHS = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    "/generate": {"inputs": "abc"},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [97]},
}


def post(server: ParrotServer, path: str, content_type: str) -> tuple[int, Any]:
    return server.post(path, PATHS[path], {"content-type": content_type})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json; charset=us-ascii",
        "application/json; profile=x",
        "application/vnd.api+json",
        "application/x-www-form-urlencoded",  # what `curl -d` says
        "text/plain;charset=UTF-8",  # what `fetch` says of a text
        "",
    ],
)
def test_bodies_that_may_be_json_are_read(server: ParrotServer, path: str, content_type: str) -> None:
    assert post(server, path, content_type)[0] == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data; boundary=x",
        "text/xml",
        "application/xml",
        "application/octet-stream",
        "text/html",
        "application/msgpack",
        "json",
        "+json",
        "application/+json/x+json",
        "application/json, application/json",
        "application/json; charset=utf-16",
        "application/json; charset=latin-1",
        'text/plain; charset="iso-8859-1"',
        "application/json; charset=",
    ],
)
def test_bodies_that_say_they_are_something_else_are_refused(
    server: ParrotServer, path: str, content_type: str
) -> None:
    status, answer = post(server, path, content_type)
    assert status == 415
    if path == "/generate":
        assert answer["error_type"] == "validation"
    else:
        assert answer["error"]["code"] == "unsupported_content_type"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (b"Content-Type: application/json\r\nContent-Type: text/xml\r\n", 415, "unsupported_content_type"),
        (b"Content-Type: text/xml\r\nContent-Type: application/json\r\n", 415, "unsupported_content_type"),
        (b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n", 415, "unsupported_content_encoding"),
        (b"Content-Length: %d\r\n" % (MAX_BODY_BYTES + 1), 413, "body_too_large"),
    ],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_what_the_headers_tell_is_refused_unread_whether_or_not_the_queue_is_full(
    is_full: bool, headers: bytes, status: int, code: str
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"
    with parrot(max_num_seqs=1, max_num_queued_reqs=1) as server, ExitStack() as stack:
        for _ in range(2 if is_full else 0):
            stack.enter_context(server.held())
        [answer] = ask(server, head)
    assert (answer.status, answer.error["code"]) == (status, code)


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"identity, chunked", b"deflate, chunked"])
def test_other_codings_than_chunks_are_not_decoded(server: ParrotServer, coding: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: %b\r\n\r\n" % coding
    body = json.dumps(PATHS["/v1/completions"]).encode()
    [answer] = ask(server, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")
    wait_until(lambda: server.service.state.num_open == 0)
