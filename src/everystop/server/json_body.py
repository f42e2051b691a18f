"""From the bytes of a body to its JSON object: strict, and bounded before anything is made of it."""

from __future__ import annotations

from typing import Any

import msgspec

from everystop.core.errors import RequestError
from everystop.server import json_shape

MAX_JSON_MARKS = 2_000_000
_COUNTED_BYTES = 1 << 18


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; strict JSON, so no NaN, no lone surrogates, no numbers beyond a double, no key twice
    in one object, and nothing nested without end.
    """
    _check_num_marks(body)
    marks = json_shape.skeleton(body)
    if json_shape.is_deeper(marks):
        message = f"the body's JSON is nested too deeply: more than {json_shape.MAX_DEPTH} levels"
        raise RequestError(message, code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if type(value) is not dict:
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if json_shape.has_equal_keys(marks, value):
        raise RequestError("the body's JSON has an object that names a key twice; name each once", code="invalid_json")
    return value


def _check_num_marks(body: bytes) -> None:
    """Refuse a body of so many values that making them would hold up every thread: the decoder keeps the interpreter
    lock. Marks inside of texts count too, for a body is counted piece by piece, between which others may run.
    """
    num_marks = 0
    for start in range(0, len(body) if len(body) > MAX_JSON_MARKS else 0, _COUNTED_BYTES):
        num_marks += sum(body.count(mark, start, start + _COUNTED_BYTES) for mark in (b",", b"[", b"{"))
        if num_marks > MAX_JSON_MARKS:
            raise RequestError(
                f"the body holds more than {MAX_JSON_MARKS:,} commas and brackets; send less at once",
                code="body_too_complex",
            )
