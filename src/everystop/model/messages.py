"""The messages of a chat: which there are, and what a template gets of each; one rule for the API and for `LLM`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everystop.core.errors import RequestError, UnsupportedField

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # text parts of one message
MAX_TOOL_CALLS = 128  # of one message
MAX_NAME_CHARS = 256

_NAME_SCHEMA = {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": {"type": "null"},
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA, "maxItems": MAX_PARTS}]}
_CALLS_SCHEMA = {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOL_CALLS}
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [_CONTENT_SCHEMA, {"type": "null"}]},
        "name": _NAME_SCHEMA,
        "tool_call_id": _NAME_SCHEMA,
        "tool_calls": {"anyOf": [_CALLS_SCHEMA, {"type": "null"}]},
        "annotations": {"enum": [[], None]},
    },
    "required": ["role"],
    "additionalProperties": {"type": "null"},
    "anyOf": [
        {"properties": {"content": _CONTENT_SCHEMA}, "required": ["content"]},
        {
            "properties": {"role": {"const": "assistant"}, "tool_calls": {**_CALLS_SCHEMA, "minItems": 1}},
            "required": ["role", "tool_calls"],
        },
    ],
}
MESSAGES_SCHEMA: dict[str, Any] = {  # what `read_messages` takes
    "type": "array",
    "items": _MESSAGE_SCHEMA,
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become a prompt: whether it opens the assistant's turn, or leaves the last message open, and what
    else a template may look at. `add_special_tokens` puts around it what a raw prompt gets, begin-of-text once.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


PLAIN = ChatOptions()


def read_messages(messages: Any, name: str = "messages") -> tuple[dict[str, Any], ...]:
    """The messages as a template gets them; what has been read once reads the same again.

    Text parts are joined by line ends, no content is "", a developer speaks as the system, and what is None is absent.
    Raises RequestError that names the place, UnsupportedField for keys and parts that are not served.
    """
    if not isinstance(messages, list | tuple) or not 0 < len(messages) <= MAX_MESSAGES:
        raise _wrong(name, messages, f"a list of 1 to {MAX_MESSAGES:,} messages")
    return tuple(_read_message(message, f"{name}[{i}]") for i, message in enumerate(messages))


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, message, "an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    if given.get("annotations") == []:
        del given["annotations"]
    for key in given:
        if key not in TEMPLATE_KEYS:
            place = f"{where}.{str(key)[:60]}"
            raise UnsupportedField(place, f"{place} is not served; remove it")
    read: dict[str, Any] = {"role": _read_role(given, where), "content": _read_content(given, where)}
    for key in ("name", "tool_call_id"):
        if key in given:
            read[key] = _read_name(given[key], f"{where}.{key}")
    if "tool_calls" in given:
        read["tool_calls"] = _read_tool_calls(given["tool_calls"], f"{where}.tool_calls")
    return read


def _read_role(given: dict[str, Any], where: str) -> str:
    role = given.get("role")
    if role is None:
        raise RequestError(f"{where}.role is missing", param=f"{where}.role", code="missing_field")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    return "system" if role == "developer" else role


def _read_content(given: dict[str, Any], where: str) -> str:
    content, place = given.get("content"), f"{where}.content"
    if content is None:
        if given.get("role") == "assistant" and given.get("tool_calls"):
            return ""
        raise RequestError(f"{place} is missing", param=place, code="missing_field")
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _wrong(place, content, "a string or a list of text parts")
    if len(content) > MAX_PARTS:
        message = f"{place} has {len(content):,} parts; at most {MAX_PARTS:,} are taken"
        raise RequestError(message, param=place, code="invalid_value")
    return "\n".join(_read_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise _wrong(where, part, 'an object such as {"type": "text", "text": "…"}')
    if kind != "text":
        raise UnsupportedField(where, f"{where} is of type {reprlib.repr(kind)}; only text parts are supported")
    text = part.get("text")
    if any(value is not None and key not in ("type", "text") for key, value in part.items()) or not isinstance(
        text, str
    ):
        raise _wrong(where, part, '{"type": "text", "text": "…"} with a string')
    return text


def _read_name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise _wrong(where, value, f"a string of at most {MAX_NAME_CHARS} characters")
    return value


def _read_tool_calls(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not all(isinstance(call, Mapping) for call in value):
        raise _wrong(where, value, "a list of objects")
    if len(value) > MAX_TOOL_CALLS:
        message = f"{where} has {len(value):,} calls; at most {MAX_TOOL_CALLS:,} are taken"
        raise RequestError(message, param=where, code="invalid_value")
    return list(value)


def _wrong(name: str, value: Any, must: str) -> RequestError:
    return RequestError(f"{name} is {reprlib.repr(value)}; it must be {must}", param=name, code="invalid_value")
