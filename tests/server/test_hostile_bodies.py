"""Bodies made by hand to hurt: each is answered at once, with a described status and a readable error, never a 500."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server.errors import TGI_PATHS
from everystop.server.fields import Field
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS, STREAM_OPTION_FIELDS
from everystop.server.operations import OPERATIONS
from everystop.server.tgi import COMPAT_FIELDS, GENERATE_PARAMETERS
from everystop.server.tokenize import DETOKENIZE_FIELDS, TGI_TOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, TOKENIZE_FIELDS

MESSAGES = [{"role": "user", "content": "ab"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def nested(depth: int, inner: Any = 1) -> Any:
    value = inner
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


VALUES: list[Any] = [
    True, False, 0, -0.0, 1, -1, 2, 1.5, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400,
    "", "a", "0", "null", "true", "NaN", "\x00", "\u2028", "\ufffe", "🚌" * 100, "a" * 100_000, "%s%n{0}${x}",
    "<|im_end|>", "../../etc/passwd",
    [], [[]], [None], [0], [-1], [1.5], ["a", 1], ["a", ["a"]], [True], [{}], list(range(2_000)),
    {}, {"": None}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"97": 1e9}, {"-1": 1}, {"__class__": "x"},
    nested(50),
]  # fmt: skip

# A path, the body that holds the field, and the place of the field in it.
TARGETS: list[tuple[str, dict[str, Any], Mapping[str, Field], str]] = [
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2}, COMPLETION_FIELDS, ""),
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "stream": True}, STREAM_OPTION_FIELDS, "stream_options"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2}, CHAT_FIELDS, ""),
    ("/generate", {"inputs": "ab"}, GENERATE_PARAMETERS, "parameters"),
    ("/", {"inputs": "ab"}, COMPAT_FIELDS, ""),
    ("/tokenize", {"prompt": "ab"}, TOKENIZE_FIELDS, ""),
    ("/tokenize", {"messages": MESSAGES}, TOKENIZE_CHAT_FIELDS, ""),
    ("/tokenize", {"inputs": "ab"}, TGI_TOKENIZE_FIELDS, ""),
    ("/detokenize", {"tokens": [97]}, DETOKENIZE_FIELDS, ""),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ParrotServer]:
    with parrot(max_model_len=64) as running:
        yield running


def check(path: str, status: int, body: bytes, what: object) -> None:
    """A described status; an error has the shape of its dialect and says something."""
    operation = OPERATIONS["POST", path]
    assert status in {200, 400, *operation.errors}, (what, status, body[:300])
    assert status not in (429, 500, 503), (what, body[:300])
    if status == 200:
        return
    error = json.loads(body)
    if "error_type" in error:
        assert path in TGI_PATHS or path == "/tokenize", what
        assert status != 400, (what, "TGI says 422")
        assert error["error"], what
    else:
        assert set(error["error"]) == {"message", "type", "param", "code"}, what
        assert error["error"]["message"], what
    assert len(body) < 2_000, (what, "an error does not repeat what was sent")


def send(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize(("path", "base", "rows", "place"), TARGETS, ids=lambda value: str(value)[:30])
def test_no_value_of_any_field_fails_inside(
    server: ParrotServer, path: str, base: dict[str, Any], rows: Mapping[str, Field], place: str
) -> None:
    assert rows
    with closing(server.connect()) as connection:
        for name in rows:
            for value in VALUES:
                body = base | ({place: {name: value}} if place else {name: value})
                status, answer = send(connection, path, json.dumps(body).encode())
                check(path, status, answer, (path, name, str(value)[:60]))
    assert server.complete("ab")[1]["choices"][0]["text"] == "ab"


MESSAGE_VALUES: list[Any] = [
    [], {}, "a", None, [None], ["a"], [{}], [[{"role": "user", "content": "a"}]], [{"role": "user"}],
    [{"content": "a"}], [{"role": "nobody", "content": "a"}], [{"role": ["user"], "content": "a"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": 7}], [{"role": "user", "content": []}],
    [{"role": "user", "content": [None]}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 7}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    [{"role": "user", "content": "a", "name": 7}], [{"role": "user", "content": "a", "x": 1}],
    [{"role": "assistant", "content": None, "tool_calls": []}], [{"role": "assistant", "tool_calls": [7]}],
    [{"role": "tool", "content": "a", "tool_call_id": []}], [{"role": "user", "content": "a"}] * 5_000,
    [{"role": "user", "content": nested(50)}], [{"role": "user", "content": "{{ ''.__class__ }}"}] * 2,
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_no_shape_of_messages_fails_inside(server: ParrotServer, path: str) -> None:
    with closing(server.connect()) as connection:
        for messages in MESSAGE_VALUES:
            body = json.dumps({"messages": messages}).encode()
            status, answer = send(connection, path, body)
            check(path, status, answer, messages)


BROKEN: list[bytes] = [
    b"", b" ", b"{", b"}", b"nul", b"null", b"true", b"7", b'"a"', b"[]", b"[{}]", b"{}{}", b'{"prompt"}', b'{"a":}',
    b"{'prompt': 'a'}", b'{"prompt": NaN}', b'{"prompt": Infinity}', b'{"prompt": -Infinity}', b'{"temperature": NaN}',
    b'{"prompt": 1e999}', b'{"temperature": 1e999}', b'{"temperature": -1e999}', b'{"seed": ' + b"9" * 5_000 + b"}",
    b'{"seed": -' + b"9" * 100_000 + b"}", b'{"max_tokens": 0x10}', b'{"max_tokens": 01}', b'{"max_tokens": +1}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"\\ud800": 1}',
    b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xc0\x80"}', b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}", b'{"prompt": "a\x00b"}', b'{"prompt": "a\nb"}', b'{"prompt": "\\x41"}', b'{"prompt": "a", }',
    b'{"prompt": "a" /* why */}', b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5_000 + b"]" * 5_000,
    b'{"metadata":' + b"[" * 5_000 + b"]" * 5_000 + b"}", b'{"' + b"a" * 100_000 + b'": 1}',
    b'{"prompt": "a", "prompt": "a"}',
    b"prompt=a&max_tokens=1", b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n',
    b"\x00" * 1_000, b"\x1f\x8b\x08\x00", b"<prompt>a</prompt>",
]  # fmt: skip


@pytest.mark.parametrize("path", sorted(path for method, path in OPERATIONS if method == "POST"))
def test_no_broken_body_fails_inside(server: ParrotServer, path: str) -> None:
    with closing(server.connect()) as connection:
        for body in BROKEN:
            status, answer = send(connection, path, body)
            assert status in (400, 422), (body[:60], status, answer[:300])
            check(path, status, answer, body[:60])


def test_every_path_with_a_body_was_a_target() -> None:
    with_body = {path for (method, path), operation in OPERATIONS.items() if operation.body is not None}
    same_rows = {"/generate_stream"}  # as /generate, whose parameters they are
    assert with_body == {path for path, *_ in TARGETS} | same_rows
