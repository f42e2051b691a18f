"""From the bytes of a body to its JSON object: strict, and bounded before anything is made of it."""

from __future__ import annotations

from typing import Any

import msgspec

from everystop.core.errors import RequestError
from everystop.server import json_faults, json_shape

MAX_VALUES = 1_350_000
LIST_VALUES = KEY_VALUES = 3  # what an array, an object and a key count, by what they cost the decoder
BYTES_PER_VALUE = 32  # long numbers and texts cost more than short ones


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; strict JSON, so no NaN, no lone surrogates, no numbers beyond a double, no key twice
    in one object, and nothing nested without end.
    """
    marks = json_shape.skeleton(body)
    _check_size(len(body), json_shape.size_of(marks))
    if json_shape.is_deeper(marks):
        message = f"the body's JSON is nested too deeply: more than {json_shape.MAX_DEPTH} levels"
        raise RequestError(message, code="invalid_json")
    if json_shape.has_long_number(body):
        raise json_faults.number_refused(body)
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError:
        raise json_faults.number_refused(body) from None
    except msgspec.DecodeError as error:
        raise json_faults.not_json(body, error) from None
    if type(value) is not dict:
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if json_shape.has_equal_keys(marks, value):
        raise RequestError("the body's JSON has an object that names a key twice; name each once", code="invalid_json")
    return value


def _check_size(num_bytes: int, size: json_shape.Size) -> None:
    """Refuse a body of so many values that making them would hold up every thread: the decoder keeps the interpreter
    lock for about 80 ns a value.
    """
    num_values = size.num_commas + LIST_VALUES * size.num_lists + KEY_VALUES * size.num_keys
    num_values += num_bytes // BYTES_PER_VALUE
    if num_values > MAX_VALUES:
        raise RequestError(
            f"the body's JSON has {size.num_commas:,} commas, {size.num_lists:,} arrays and objects, {size.num_keys:,} "
            f"keys, and {num_bytes:,} bytes; these count {num_values:,} values (an array, object or key {LIST_VALUES}, "
            f"{BYTES_PER_VALUE} bytes one), and at most {MAX_VALUES:,} are taken; send less at once",
            code="body_too_complex",
        )
