"""What a hostile client can send: a 4xx before it costs anything, which says nothing of the inside.

A corpus of bodies and of raw bytes; the server answers, keeps its memory, and lets others in meanwhile (AC-65).
"""

from __future__ import annotations

import json
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.measuring import least, rss_bytes
from tests.server.parrot import ParrotServer, parrot, wait_until
from tests.server.test_security import raw, status_of

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ERROR_KEYS, TGI_ERROR_KEYS = {"message", "type", "param", "code"}, {"error", "error_type"}
MIB = 1 << 20
INSIDE = re.compile(
    r"0x[0-9a-fA-F]{4,}|Traceback|File \"|\.py\b|site-packages|/(?:home|usr|root|tmp|work|opt|var)/|object at "
)


def completion(**fields: Any) -> Callable[[], bytes]:
    """The body of a completion, made when it is needed."""
    return lambda: json.dumps({"prompt": "a", **fields}).encode()


def chat(content: Any = "a", **fields: Any) -> Callable[[], bytes]:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return lambda: json.dumps({"messages": messages, **fields}).encode()


def literally(text: str | bytes, times: int = 1) -> Callable[[], bytes]:
    """The text as it is, repeated."""
    return lambda: (text if isinstance(text, bytes) else text.encode()) * times


def around(before: str, middle: str, times: int, after: str = "") -> Callable[[], bytes]:
    return lambda: (before + middle * times + after).encode()


DEEP = 100_000
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "n of a billion": (COMPLETIONS, completion(n=10**9)),
    "n of a billion in a chat": (CHAT, chat(n=10**9)),
    "n of zero": (COMPLETIONS, completion(n=0)),
    "n below zero": (COMPLETIONS, completion(n=-1)),
    "n beyond 64 bits": (COMPLETIONS, literally('{"prompt": "a", "n": 18446744073709551617}')),
    "best_of": (COMPLETIONS, completion(best_of=10**9)),
    "ten thousand prompts": (COMPLETIONS, completion(prompt=["a"] * 10_000)),
    "ten thousand prompts of ids": (COMPLETIONS, completion(prompt=[[1]] * 10_000)),
    "a thousand prompts times n": (COMPLETIONS, completion(prompt=["a"] * 1000, n=128)),
    "prompts and n of a billion": (COMPLETIONS, completion(prompt=["a"] * 10_000, n=10**9)),
    "a million logprobs": (COMPLETIONS, completion(logprobs=10**6)),
    "logprobs below zero": (COMPLETIONS, completion(logprobs=-1)),
    "a million logprobs in a chat": (CHAT, chat(logprobs=True, top_logprobs=10**6)),
    "all logprobs of the prompt": (COMPLETIONS, completion(prompt_logprobs=-1)),
    "a million logprobs of the prompt": (COMPLETIONS, completion(prompt_logprobs=10**6)),
    "a million stops": (COMPLETIONS, completion(stop=["x"] * 10**6)),
    "a stop of a megabyte": (COMPLETIONS, completion(stop="x" * MIB)),
    "an empty stop": (COMPLETIONS, completion(stop=[""])),
    "a million stop ids": (COMPLETIONS, completion(stop_token_ids=[1] * 10**6)),
    "a hundred thousand biases": (COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(10**5)})),
    "a bias of a huge id": (COMPLETIONS, completion(logit_bias={"9" * 10_000: 1})),
    "a bias of an id below zero": (COMPLETIONS, completion(logit_bias={"-1": 1})),
    "ids beyond the vocabulary": (COMPLETIONS, completion(prompt=[2**31 - 1, 2**63, -1])),
    "ids below zero": (COMPLETIONS, completion(prompt=[-(2**31)])),
    "allowed ids beyond the vocabulary": (COMPLETIONS, completion(allowed_token_ids=[10**9])),
    "no allowed id": (COMPLETIONS, completion(allowed_token_ids=[])),
    "ten thousand messages": (CHAT, chat(messages=[{"role": "user", "content": "a"}] * 10_000)),
    "ten thousand parts": (CHAT, chat([{"type": "text", "text": "a"}] * 10_000)),
    "an image": (CHAT, chat([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}])),
    "a file": (CHAT, chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
    "a thousand calls of tools": (
        CHAT, chat(messages=[{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}] * 1000}]),
    ),
    "a name of a megabyte": (CHAT, chat(messages=[{"role": "user", "content": "a", "name": "x" * MIB}])),
    "a role of a megabyte": (CHAT, chat(messages=[{"role": "x" * MIB, "content": "a"}])),
    "a message with a key of a megabyte": (CHAT, chat(messages=[{"role": "user", "content": "a", "x" * MIB: 1}])),
    "a template": (CHAT, chat(chat_template="{% for i in range(10**9) %}{% endfor %}")),
    "arguments of a template": (CHAT, chat(chat_template_kwargs={"x" * 99: "y" * MIB})),
    "choices of a billion for TGI": (GENERATE, literally('{"inputs": "a", "parameters": {"best_of": 1000000000}}')),
    "lists 100,000 deep for TGI": (GENERATE, around('{"inputs": "a", "parameters": ', "[", DEEP, "]" * DEEP + "}")),
    "a text of 30 MB for TGI": (GENERATE, around('{"inputs": "', "a", 30 * MIB, '"}')),
    "a key named twice for TGI": (GENERATE, literally('{"inputs": "a", "inputs": "b"}')),
    "ids beyond the vocabulary to detokenize": ("/detokenize", literally('{"tokens": [1000000000]}')),
    "a chat to tokenize of 10,000 messages": ("/tokenize", chat(messages=[{"role": "user", "content": "a"}] * 10_000)),
    "tools": (CHAT, chat(tools=[{"type": "function", "function": {"name": "x", "parameters": {"pattern": "(a+)+$"}}}])),
    "a grammar": (COMPLETIONS, completion(guided_regex="(a+)+$")),
    "a schema": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}})),
    "embeddings of a prompt": (COMPLETIONS, completion(prompt_embeds="gASVCAAAAAAAAACMBG5vbmWUhZQu")),
    "a pickle": (COMPLETIONS, literally(b"\x80\x04\x95\x08\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.")),
    "a model that is a path": (COMPLETIONS, completion(model="../../../../etc/passwd")),
    "a model that is a pipe": (COMPLETIONS, completion(model="/dev/stdin")),
    "a model with a zero": (COMPLETIONS, completion(model="parrot\x00")),
    "a model of a megabyte": (COMPLETIONS, completion(model="x" * MIB)),
    "a salt of a megabyte": (COMPLETIONS, completion(cache_salt="x" * MIB)),
    "max_tokens of a billion billions": (COMPLETIONS, completion(max_tokens=10**18)),
    "max_tokens below zero": (COMPLETIONS, completion(max_tokens=-1)),
    "a prompt beyond the context": (COMPLETIONS, completion(prompt="a" * 5000)),
    "a prompt of 30 MB": (COMPLETIONS, completion(prompt="a" * 30 * MIB)),
    "a message of 30 MB": (CHAT, chat("a" * 30 * MIB)),
    "an empty prompt": (COMPLETIONS, completion(prompt="")),
    "no prompt": (COMPLETIONS, completion(prompt=[])),
    "prompts without ids": (COMPLETIONS, completion(prompt=[[]])),
    "prompts in prompts": (COMPLETIONS, completion(prompt=[[["a"]]])),
    "NaN": (COMPLETIONS, literally('{"prompt": "a", "temperature": NaN}')),
    "infinity": (COMPLETIONS, literally('{"prompt": "a", "temperature": Infinity}')),
    "a number beyond a double": (COMPLETIONS, literally('{"prompt": "a", "temperature": 1e400}')),
    "a number as a text": (COMPLETIONS, completion(temperature="0.5")),
    "a number of 100,000 digits": (COMPLETIONS, around('{"prompt": "a", "seed": ', "9", 100_000, "}")),
    "a fraction of 100,000 digits": (COMPLETIONS, around('{"prompt": "a", "n": 0.', "9", 100_000, "}")),
    "a number of 10,000,000 digits": (COMPLETIONS, around('{"prompt": "a", "max_tokens": ', "9", 10**7, "}")),
    "a lone surrogate": (COMPLETIONS, literally('{"prompt": "\\ud83d"}')),
    "a lone surrogate in a message": (CHAT, literally('{"messages": [{"role": "user", "content": "\\udc00x"}]}')),
    "a lone surrogate in a stop": (COMPLETIONS, literally('{"prompt": "a", "stop": "\\ud800"}')),
    "a lone surrogate in a key": (COMPLETIONS, literally('{"prompt": "a", "\\ud800": 1}')),
    "bytes that are no UTF-8": (COMPLETIONS, literally(b'{"prompt": "\xff\xfe"}')),
    "lists 100,000 deep": (COMPLETIONS, around('{"prompt": ', "[", DEEP, "]" * DEEP + "}")),
    "lists 100,000 deep without ends": (COMPLETIONS, literally("[", DEEP)),
    "objects 100,000 deep": (COMPLETIONS, around('{"metadata": ', '{"a":', DEEP, "1" + "}" * DEEP + "}")),
    "objects 1,000 deep": (CHAT, around('{"metadata": ', '{"a":', 1000, "1" + "}" * 1001)),
    "calls of tools 900 deep": (
        CHAT, around('{"messages": [{"role": "assistant", "tool_calls": [', '{"a":', 900, "1" + "}" * 900 + "]}]}"),
    ),
    "three million values": (COMPLETIONS, around('{"prompt": [1', ",1", 3 * 10**6, "]}")),
    "three million lists": (COMPLETIONS, around('{"metadata": [[]', ",[]", 3 * 10**6, "]}")),
    "a hundred thousand unknown fields": (COMPLETIONS, completion(**{f"x{i}": 1 for i in range(10**5)})),
    "a key named twice": (COMPLETIONS, literally('{"prompt": "a", "model": "parrot", "model": "alias"}')),
    "a key named twice below": (COMPLETIONS, literally('{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}')),
    "no JSON": (COMPLETIONS, literally("}{")),
    "no body": (COMPLETIONS, literally("")),
    "no object": (COMPLETIONS, literally("[]")),
    "zeros": (COMPLETIONS, literally(b"\x00", MIB)),
    "quotes": (COMPLETIONS, literally('"', 10 * MIB)),
    "backslashes": (COMPLETIONS, around('{"prompt": "', "\\", 10 * MIB + 1, '"}')),
    "an open text": (COMPLETIONS, around('{"prompt": "', "a", 10 * MIB)),
    "a body of 40 MB": (COMPLETIONS, literally(" ", 40 * MIB)),
    "a key of 10 MB": (COMPLETIONS, around('{"', "x", 10 * MIB, '": 1}')),
    "an unknown field with quotes": (COMPLETIONS, completion(**{'"><script>': 1})),
}  # fmt: skip
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
RAW: dict[str, bytes] = {
    "a header of 10 MB": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 10 * MIB + b"\r\n\r\n",
    "a hundred thousand headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 100_000 + b"\r\n",
    "a target of a megabyte": b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method of a megabyte": b"G" * MIB + b" / HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
    "a length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a length below zero": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "a length of 10,000 digits": HEAD + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n{}",
    "a length that is none": HEAD + b"Content-Length: 0x10\r\n\r\n{}",
    "a chunk of 16 EiB": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    "a chunk below zero": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",
    "a chunk with an endless extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 10 * MIB,
    "an unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "a bare line end": b"GET /health HTTP/1.1\nHost: x\n\n",
    "a blank in a name": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Fold: a\r\n b\r\n\r\n",
    "a zero in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Zero: a\x00b\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
    "zeros": b"\x00" * MIB,
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.fixture(scope="module")
def target() -> Iterator[ParrotServer]:
    with parrot() as server:
        yield server


MAX_TURN_S = 2.0


@contextmanager
def probed(server: ParrotServer) -> Iterator[list[int]]:
    """Statuses of `/health`, asked again and again, meanwhile; no turn of the server's event loop may take long.

    What counts is the processor time of the loop's thread between two callbacks of our own: a busy machine takes none.
    """
    statuses: list[int] = []
    longest_s, last_s, is_over = 0.0, 0.0, threading.Event()

    def turn() -> None:
        nonlocal longest_s, last_s
        now_s = time.thread_time()
        if last_s:
            longest_s = max(longest_s, now_s - last_s)
        last_s = now_s
        if not is_over.is_set():
            server.loop.call_later(0.002, turn)

    def probe() -> None:
        while not (is_over.is_set() and statuses):
            statuses.append(server.get("/health")[0])
            is_over.wait(0.01)

    server.loop.call_soon_threadsafe(turn)
    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        thread.join()
    server.let_tick(1)
    assert longest_s < MAX_TURN_S, f"everybody waited {longest_s:.1f} s for one request"


@pytest.mark.parametrize("name", BODIES)
def test_hostile_body_is_refused_with_a_reason_and_nothing_of_the_inside(target: ParrotServer, name: str) -> None:
    path, make = BODIES[name]
    with probed(target) as health:
        status, headers, answer = target.request("POST", path, make())
    assert set(health) == {200}
    error = json.loads(answer)
    assert 400 <= status < 500, answer[:500]
    assert status not in (401, 403, 405, 408)
    assert headers["content-type"] == "application/json"
    assert set(error if path == GENERATE else error["error"]) in (ERROR_KEYS, TGI_ERROR_KEYS)
    assert len(answer) < 2000, "an error repeats little of what was sent"
    assert INSIDE.search(answer.decode()) is None
    assert not target.scheduler.requests


@pytest.mark.parametrize("name", RAW)
def test_hostile_bytes_are_answered_by_4xx_or_cut_off(target: ParrotServer, name: str) -> None:
    with probed(target) as health:
        answer = raw(target, RAW[name])
    assert set(health) == {200}
    if answer and name not in ("a bare line end", "a folded header"):  # these may be read kindly
        assert 400 <= status_of(answer) < 500 or status_of(answer) in (501, 505), answer[:200]
    assert INSIDE.search(answer.decode("latin-1")) is None
    wait_until(lambda: target.service.state.num_open == 0)
    assert not target.scheduler.requests


def test_the_server_is_as_it_was_after_all_of_it(target: ParrotServer) -> None:
    """Once to warm up, then again: what remains in memory is what the first time left."""

    def grown_bytes() -> float:
        before = rss_bytes()
        send_all(target)
        return rss_bytes() - before

    send_all(target)
    assert least(grown_bytes, enough=96 * MIB, tries=3) < 96 * MIB, "the bodies of one round have 180 MiB"
    wait_until(lambda: target.service.state.num_open == 0)
    assert target.num_free_blocks == target.num_blocks
    assert target.complete("still here")[1]["choices"][0]["text"] == "still here"
    assert target.metric("num_requests_running") == target.metric("num_requests_waiting") == 0


def send_all(server: ParrotServer) -> None:
    for path, make in BODIES.values():
        server.request("POST", path, make())


@pytest.mark.parametrize(
    "path",
    ["/v1/models/../../etc/passwd", "/v1/models//etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
     "/v1/requests/../../etc/passwd", "/v1/requests/%00/explain", "/ui/../../../etc/passwd", "/ui/..%5c..%5cetc",
     "/ui/%2e%2e/%2e%2e/http.py", "/ui//etc/passwd"],
)  # fmt: skip
def test_a_name_is_never_a_path(target: ParrotServer, path: str) -> None:
    status, body = target.get(path)
    assert status == 404
    assert b"root:" not in body
    assert b"import" not in body


def test_many_hostile_clients_at_once_leave_room_for_others(target: ParrotServer) -> None:
    """Large bodies from many connections: the bound on all of them holds, and an honest request is answered."""
    body = completion(prompt="a" * 20 * MIB)()
    statuses: list[int] = []

    def attack() -> None:
        statuses.append(target.request("POST", COMPLETIONS, body)[0])

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    threads = [threading.Thread(target=attack) for _ in range(12)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert target.complete("honest")[0] == 200
    assert set(statuses) <= {400, 429}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1500 * 1024, "in KiB"
