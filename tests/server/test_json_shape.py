"""What is seen of a JSON text before it is decoded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystop.core.errors import RequestError
from everystop.server import json_shape
from everystop.server.json_body import parse_json
from everystop.server.json_shape import MAX_DEPTH, has_equal_keys, is_deeper, skeleton

TEXTS = st.text(alphabet='"\\[]{}:,ab\n\u00e9')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def marks_of(value: object) -> str:
    """The slow, obvious skeleton."""
    if isinstance(value, dict):
        return "{" + ",".join(":" + marks_of(item) for item in value.values()) + "}"
    return "[" + ",".join(map(marks_of, value)) + "]" if isinstance(value, list) else ""


@given(value=VALUES, piece_bytes=st.integers(2, 40), is_ascii=st.booleans())
def test_skeleton_is_that_of_the_value_wherever_the_text_is_cut(
    value: object, piece_bytes: int, is_ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "_PIECE_BYTES", piece_bytes)
        marks = skeleton(body)
        patch.setattr(json_shape, "_PIECE_BYTES", 16 * piece_bytes)
        assert is_deeper(marks, depth_of(value) - 1) is (depth_of(value) > 0)
        assert not is_deeper(marks, depth_of(value))
    assert marks.decode() == marks_of(value)
    assert not has_equal_keys(marks, value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 1}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"prompt": [1, 2, 3], "logit_bias": {"5": 1, "5": -1}}',
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x", "role": "system"}]}',
        b'{"metadata": [[[{"a": {"b": 1, "b": 1}}]]]}',
    ],
)
def test_a_key_named_twice_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="names a key twice"):
        parse_json(body)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":', b'["]",'])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 5_000, 100_000, 900_000])
def test_what_is_nested_too_deeply_is_refused_whatever_it_is_made_of(opening: bytes, depth: int) -> None:
    for body in (b'{"a":' + opening * depth, b'{"a":' + opening * depth + b"1" + b"]" * depth + b"}"):
        with pytest.raises(RequestError, match=r"nested too deeply|is not valid JSON|at most 1,350,000 are taken"):
            parse_json(body)


def test_nesting_within_the_bound_is_taken() -> None:
    assert parse_json(b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")
    assert parse_json(json.dumps({"a": ["[{" * 1000, '"', "\\", '\\"[' * 500]}).encode())


@pytest.mark.parametrize(
    "body", [b'"' * 3_000_000, b"\\" * 3_000_000, b'{"a": "' + b"\\" * 2_999_999 + b'"}', b":" * 99]
)
def test_bodies_of_marks_alone_are_no_json(body: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(body)
