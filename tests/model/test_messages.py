"""The messages of a chat: what a template gets of them, whoever sends them."""

from __future__ import annotations

from typing import Any

import pytest

from everystop.core.errors import RequestError, UnsupportedField
from everystop.model.messages import MAX_MESSAGES, read_messages

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        ({"role": "user", "content": (part("a"), part("b"))}, {"role": "user", "content": "a\nb"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x", "name": None, "annotations": []}, {"role": "user", "content": "x"}),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, {"role": "tool", "content": "4", "tool_call_id": "1"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
    ],
)
def test_messages_are_read_once_for_all(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_messages([message]) == (read,)
    assert read_messages(read_messages([message])) == (read,)


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), "messages"),
        ([["role"]], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "function", "content": "a"}], "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [part("a"), {"type": "text"}]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{**part("a"), "b": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a", "name": "x" * 257}], "messages[0].name"),
        ([{"role": "assistant", "content": "a", "tool_calls": ["f"]}], "messages[0].tool_calls"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_place(messages: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages(messages)
    assert caught.value.param == place
    assert place in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a", "mood": "good"},
        {"role": "user", "content": "a", "annotations": [1]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
    ],
)
def test_what_is_not_served_is_refused_by_name(message: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField):
        read_messages([message])
