"""Every error has a code that programs may rely on: it is on the list, and so is its status."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.parrot import VOCAB, ParrotServer, parrot
from tests.server.schemas import JSON, is_valid, near

from everystop.core.errors import RequestError
from everystop.server import errors
from everystop.server.error_codes import CODES
from everystop.server.errors import Dialect, code_of, error_object
from everystop.server.fields import Field
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS, STREAM_OPTION_FIELDS
from everystop.server.protocol import Accepted, parse_chat, parse_completion
from everystop.server.tgi import GENERATE_FIELDS, GENERATE_PARAMETERS
from everystop.server.tokenize import DETOKENIZE_FIELDS, TGI_TOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, TOKENIZE_FIELDS

SOURCE = Path(errors.__file__).parent.parent
TABLES: dict[str, Mapping[str, Field]] = {
    "completions": COMPLETION_FIELDS,
    "chat": CHAT_FIELDS,
    "stream_options": STREAM_OPTION_FIELDS,
    "generate": GENERATE_FIELDS,
    "parameters": GENERATE_PARAMETERS,
    "tokenize": TOKENIZE_FIELDS,
    "tokenize a chat": TOKENIZE_CHAT_FIELDS,
    "tokenize for TGI": TGI_TOKENIZE_FIELDS,
    "detokenize": DETOKENIZE_FIELDS,
}
ROWS = [(table, name) for table, rows in TABLES.items() for name in rows]
ACCEPTED = Accepted(("m",), VOCAB, 1024)
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "completions": (parse_completion, {"prompt": "a"}),
    "chat": (parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
}
HUGE = [-(10**30), 10**30, 1e300, "", "x" * 3000, [[]], {"x": {"y": 1}}, [None], True, [10**30]]
NOT_SENT = "client_gone"  # nobody is left to read it


def codes_in_the_source() -> Iterator[str]:
    """What is given as `code=…` anywhere, and what a kind of error has on the wire."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            value = node.value if isinstance(node, ast.keyword) and node.arg == "code" else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value
    yield from (wire.code for wire in errors._WIRE.values() if wire.code != NOT_SENT)
    yield errors._UNFORESEEN.code


def test_the_list_is_what_the_source_sends() -> None:
    assert set(codes_in_the_source()) | {"not_found", "method_not_allowed"} == set(CODES)


def test_kinds_of_errors_have_the_status_that_the_list_says() -> None:
    for wire in errors._WIRE.values():
        if wire.code != NOT_SENT:
            assert CODES[wire.code].status == wire.status, wire


def check(error: RequestError) -> None:
    assert CODES[code_of(error)].status in (400, 404), error
    assert error_object(error)["error"]["code"] == code_of(error)
    assert set(error_object(error, Dialect.TGI)) == {"error", "error_type"}


@pytest.mark.parametrize(("table", "name"), ROWS, ids=[f"{table}: {name}" for table, name in ROWS])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_a_field_refuses_has_a_code(table: str, name: str, data: st.DataObject) -> None:
    row = TABLES[table][name]
    value = data.draw(st.one_of(st.sampled_from(HUGE), near(row.schema), JSON.filter(lambda value: value is not None)))
    try:
        row.read(name, value)
    except RequestError as error:
        check(error)


@pytest.mark.parametrize("table", BODIES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_fields_refuse_together_has_a_code(table: str, data: st.DataObject) -> None:
    """Several fields, each with a value that it takes by itself."""
    parse, body = BODIES[table]
    rows = {name: row for name, row in TABLES[table].items() if name not in body}
    names = data.draw(st.lists(st.sampled_from(sorted(rows)), min_size=1, max_size=4, unique=True))
    drawn = {name: data.draw(near(rows[name].schema)) for name in names}
    valid = {name: value for name, value in drawn.items() if is_valid(rows[name].schema, value)}
    try:
        parse({**body, **valid}, ACCEPTED)
    except RequestError as error:
        check(error)


USER = {"role": "user", "content": "a"}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "top_logprobs alone": ("chat/completions", {"top_logprobs": 2}, "conflicting_fields"),
    "two lengths": ("chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "conflicting_fields"),
    "a turn that is open and not": (
        "chat/completions",
        {"continue_final_message": True, "add_generation_prompt": True},
        "conflicting_fields",
    ),
    "two turns of one role": ("chat/completions", {"messages": [USER, USER]}, "chat_template_error"),
    "many parts": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2000}]},
        "invalid_value",
    ),
    "options without stream": ("completions", {"stream_options": {"include_usage": True}}, "conflicting_fields"),
    "scores in a stream": ("completions", {"prompt_logprobs": 1, "stream": True}, "conflicting_fields"),
    "times of several": ("completions", {"timings_per_token": True, "n": 2}, "conflicting_fields"),
    "nothing to do": ("completions", {"max_tokens": 0}, "conflicting_fields"),
    "a minimum above the maximum": ("completions", {"min_tokens": 5, "max_tokens": 2}, "conflicting_fields"),
    "a side without a length": ("completions", {"truncation_side": "right"}, "conflicting_fields"),
    "no allowed token": ("completions", {"allowed_token_ids": []}, "no_token_allowed"),
    "only an end, and not yet": ("completions", {"allowed_token_ids": [256], "min_tokens": 1}, "no_token_allowed"),
    "a bias of no token": ("completions", {"logit_bias": {"99999": 1}}, "invalid_token_id"),
    "a bias with a zero in front": ("completions", {"logit_bias": {"05": 1}}, "invalid_value"),
    "too many prompts": ("completions", {"prompt": ["a"] * 2000}, "too_many_sequences"),
    "too many choices": ("completions", {"prompt": ["a"] * 1000, "n": 9}, "too_many_sequences"),
    "too many scores": ("completions", {"prompt": ["a" * 900] * 20, "prompt_logprobs": 20}, "too_many_logprobs"),
    "a long stop": ("completions", {"stop": "x" * 2000}, "invalid_value"),
    "a long prompt": ("completions", {"prompt": "a" * 2000}, "context_length_exceeded"),
    "an unknown model": ("completions", {"model": "gpt"}, "model_not_found"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_over_http_have_their_code(server: ParrotServer, name: str) -> None:
    path, fields, code = REFUSED[name]
    body = {"messages": [USER]} if path.startswith("chat") else {"prompt": "a"}
    status, answer = server.post(f"/v1/{path}", body | fields)
    assert answer["error"]["code"] == code, answer
    assert status == CODES[code].status


def test_a_fault_of_the_server_has_a_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with parrot() as server:
        monkeypatch.setattr(type(server.service.state.board), "open", None)
        status, _, body = server.request("POST", "/v1/completions", {"prompt": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (500, "server_error")
