"""One row a field: its reader takes what its schema says, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.parrot import VOCAB
from tests.server.schemas import JSON, is_valid, near

from everystop.core.errors import RequestError, UnsupportedField
from everystop.server import fields
from everystop.server.fields import Effect, Field, object_schema, read_fields
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from everystop.server.protocol import Accepted, parse_chat, parse_completion

TABLES = {"completions": COMPLETION_FIELDS, "chat": CHAT_FIELDS}
ROWS = [(name, row) for name, row in COMPLETION_FIELDS.items()] + [
    (name, row) for name, row in CHAT_FIELDS.items() if COMPLETION_FIELDS.get(name) is not row
]
ACCEPTED = Accepted(("m",), VOCAB, 1024)


def takes(row: Field, value: Any) -> bool:
    try:
        row.read("field", value)
    except RequestError as error:
        if error.param is None or not error.param.startswith("field"):
            raise
        return False
    return True


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[name for name, _ in ROWS])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_reader_and_schema_agree(name: str, row: Field, data: st.DataObject) -> None:
    value = data.draw(st.one_of(near(row.schema), near(row.schema), JSON.filter(lambda value: value is not None)))
    if value is not None:
        assert takes(row, value) == is_valid(row.schema, value), value


@pytest.mark.parametrize(
    ("row", "good", "bad"),
    [
        (fields.integer(1, 8), [1, 8], [0, 9, True, 1.0, "1"]),
        (fields.number(0.0, 2.0), [0, 2, 1.5], [-0.1, 2.1, True, "1"]),
        (fields.string(3), ["", "abc"], ["abcd", 1]),
        (fields.boolean(), [True, False], [0, 1, "true"]),
        (fields.one_of("a", "b"), ["a", "b"], ["c", "", 1, ["a"]]),
        (fields.texts(2, 3), [[], ["", "abc"]], [["abcd"], ["a"] * 3, "a", [1], {}]),
        (fields.only(1, [], why="…"), [1, 1.0, []], [True, 2, [1], {}]),
        (fields.only(why="…"), [], [True, 2, "", [], {}]),
        (fields.token_ids(2), [[], [1, 2]], [[1, 2, 3], [1.0], [True], 1]),
        (fields.stop_strings(2, 3), ["a", ["a", "abc"], []], ["", [""], "abcd", ["a"] * 3, 1]),
        (
            fields.logit_bias(2, 5.0),
            [{}, {"0": 5, "12": -5.0}],
            [
                {"a": 1},
                {"1": 6},
                {"1\n": 1},
                {"1": None},
                [],
                {"05": 1},
                {"00": 1},
                {" 5": 1},
                {"+5": 1},
                {"5_0": 1},
                {"５": 1},
            ],
        ),
        (
            fields.scalars(max_entries=2, max_items=2, max_chars=3),
            [{}, {"a": True, "b": [1, "abc"]}, {"a": None}],
            [{"a": {}}, {"a": [[1]]}, {"a": "abcd"}, {"a": [1] * 3}, {"a": 1, "b": 2, "c": 3}, {"a": [None]}],
        ),
        (fields.table({"a": fields.boolean()}), [{}, {"a": True}, {"b": None}], [{"a": 1}, {"b": 1}, [], True]),
    ],
)
def test_what_the_factories_take(row: Field, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert takes(row, value), value
        assert is_valid(row.schema, value), value
    for value in bad:
        assert not takes(row, value), value
        assert value == 1.0 or not is_valid(row.schema, value), value


def test_the_echo_of_a_large_object_sorts_no_keys() -> None:
    class Key(str):
        __slots__ = ()

        def __lt__(self, other: object) -> bool:
            raise AssertionError("keys were sorted")

    value = {Key(i): i for i in range(100)}
    assert fields.echo(value) == "{'0': 0, '1': 1, '2': 2, '3': 3, ...}"


def test_a_body_is_valid_by_its_schema_if_it_is_read() -> None:
    rows = {"a": fields.integer(0, 3), "b": fields.no_effect()}
    schema = object_schema(rows, required=["a"])
    for body in ({"a": 0}, {"a": 1, "b": None}, {"a": 1, "unknown": None}, {"a": 3, "b": {"x": [1]}}):
        assert is_valid(schema, body)
        read_fields(body, rows)
    assert not is_valid(schema, {"a": 1, "unknown": 0})
    assert not is_valid(schema, {"b": 1})
    with pytest.raises(UnsupportedField, match="unknown"):
        read_fields({"a": 1, "unknown": 0}, rows)


@pytest.mark.parametrize("route", TABLES)
def test_neutral_values_change_nothing_and_others_are_refused_by_name(route: str) -> None:
    parse, body = (
        (parse_completion, {"prompt": "a"})
        if route == "completions"
        else (parse_chat, {"messages": [{"role": "user", "content": "a"}]})
    )
    plain = parse(body, ACCEPTED)
    rows = {name: row for name, row in TABLES[route].items() if row.effect is Effect.NEUTRAL_ONLY}
    assert len(rows) >= 10
    for name, row in rows.items():
        for neutral in row.schema.get("enum", [1]):
            parsed = parse({**body, name: neutral}, ACCEPTED)
            if name != "service_tier":  # which the answer names
                assert parsed == plain, name
        with pytest.raises(RequestError) as caught:
            parse({**body, name: 100}, ACCEPTED)
        assert caught.value.param == name
        assert name in str(caught.value)


@pytest.mark.parametrize("route", TABLES)
def test_fields_without_effect_change_nothing(route: str) -> None:
    parse, body = (
        (parse_completion, {"prompt": "a"})
        if route == "completions"
        else (parse_chat, {"messages": [{"role": "user", "content": "a"}]})
    )
    rows = [name for name, row in TABLES[route].items() if row.effect is Effect.NO_EFFECT]
    assert {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"} <= set(rows)
    for name in rows:
        assert parse({**body, name: True}, ACCEPTED) == parse(body, ACCEPTED)


VALUES: dict[str, Any] = {  # an unusual value of each field that is honoured, with what it needs beside it
    "min_tokens": 3, "temperature": 0.3, "top_p": 0.3, "top_k": 3, "min_p": 0.3, "repetition_penalty": 1.3,
    "presence_penalty": 0.3, "frequency_penalty": 0.3, "seed": 3, "n": 3, "stop": "x", "stop_token_ids": [3],
    "ignore_eos": True, "logit_bias": {"3": 1}, "allowed_token_ids": [3], "skip_special_tokens": False,
    "include_stop_str_in_output": True, "max_tokens": 33, "max_completion_tokens": 33, "model": "other",
    "stream": True, "stream_options": {"include_usage": True}, "stream_interval": 3, "include_metrics": True,
    "timings_per_token": True, "cache_salt": "x", "priority": 3, "ttft_target_ms": 333, "itl_target_ms": 333,
    "prompt": "b", "messages": [{"role": "user", "content": "b"}], "add_generation_prompt": False,
    "continue_final_message": True, "chat_template_kwargs": {"a": 1}, "top_logprobs": 3,
    "timeout": 3,
    "prompt_logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True, "echo": True,
    "truncate_prompt_tokens": 3, "truncation_side": "right", "bad_words": ["x"],
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "stream_interval": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 3},
}
OF_ROUTE = {
    "completions": {"logprobs": 3, "add_special_tokens": False},
    "chat": {"logprobs": True, "add_special_tokens": True},
}


@pytest.mark.parametrize("route", TABLES)
def test_every_honoured_field_changes_what_is_asked(route: str) -> None:
    """A field that were read and dropped would be ignored silently."""
    parse, body = (
        (parse_completion, {"prompt": "a"})
        if route == "completions"
        else (parse_chat, {"messages": [{"role": "user", "content": "a"}]})
    )
    accepted = Accepted(("m", "other"), VOCAB, 1024, has_priorities=True, has_targets=True)
    for name, row in TABLES[route].items():
        if row.effect is not Effect.HONOURED or name == "spaces_between_special_tokens":
            continue
        value = OF_ROUTE[route].get(name, VALUES.get(name))
        assert value is not None, f"{name} has no value to be tried with"
        beside = BESIDE.get(name, {})
        if name == "return_tokens_as_token_ids":
            beside = {"logprobs": OF_ROUTE[route]["logprobs"]}
        assert parse({**body, **beside, name: value}, accepted) != parse({**body, **beside}, accepted), name
