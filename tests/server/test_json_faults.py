"""Errors about bodies that cannot be decoded say what is wrong, and where."""

from __future__ import annotations

import pytest
from tests.server.parrot import ParrotServer

from everystop.core.errors import RequestError
from everystop.server.json_body import parse_json

RANGE = "numbers must be from -1.8e308 to 1.8e308, and have at most 400 digits"


def error_of(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_json(body)
    assert caught.value.code == "invalid_json"
    return caught.value


@pytest.mark.parametrize("body", [b"", b" ", b"\r\n\t "])
def test_an_empty_body_is_called_so(body: bytes) -> None:
    assert str(error_of(body)) == "the body is empty; send a JSON object"


TOO_EARLY = [b"{", b'{"a":', b'{"a": [1, 2', b'{"prompt": "a', b'{"p": "\\\\ud800 \\ud83d\\ude00", ']


@pytest.mark.parametrize("body", TOO_EARLY)
def test_a_body_that_ends_too_early_is_called_so(body: bytes) -> None:
    assert f"it ends after {len(body)} bytes, before its JSON does" in str(error_of(body))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"prompt":"a\\ud800b"}', r"\ud800 at byte 12"),
        (b'{"prompt":"a\\uD800\\u0041b"}', r"\uD800 at byte 12"),
        (b'{"prompt":"a\\ud800\\n"}', r"\ud800 at byte 12"),
        (b'{"prompt":"\\udc00"}', r"\udc00 at byte 11"),
        (b'{"prompt":"\\ud83d\\ude00\\ud83d\\ud83d\\ude00"}', r"\ud83d at byte 23"),
        (b'{"prompt":"\\\\ud800\\\\\\udfff"}', r"\udfff at byte 20"),
        (b'{"\\ud800":1}', r"\ud800 at byte 2"),
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_place(body: bytes, place: str) -> None:
    message = str(error_of(body))
    assert f"the escape {place} is half of a surrogate pair without the other" in message


@pytest.mark.parametrize(("body", "place"), [(b'{"p":"\xed\xa0\xbd"}', 6), (b'{"p":"\xc3\xa9\xff"}', 8)])
def test_what_is_no_utf8_is_named_with_its_place(body: bytes, place: int) -> None:
    assert f"a text is not UTF-8 at byte {place}" in str(error_of(body))


@pytest.mark.parametrize("number", ["1e999", "-1.5E400", "1" * 401, "7" * 5_000, "-" + "7" * 100_000])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"prompt": "a", "temperature": %s}', "temperature"),
        ('{"inputs": "a", "parameters": {"top_k": 1, "temperature": %s}}', "parameters.temperature"),
        ('{"logit_bias": {"5": %s , "6": 1}, "prompt": "a"}', "logit_bias.5"),
    ],
)
def test_a_number_beyond_the_range_is_named_with_its_field(body: str, name: str, number: str) -> None:
    error = error_of((body % number).encode())
    shown = number if len(number) <= 20 else f"{number[:20]}…"
    assert str(error) == f"{name} is {shown}, which is too large or too long; {RANGE}"
    assert error.param == name


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": [1, 1e999]}', "prompt"),
        (b'{"metadata": {"a": {"b": 1e999}}}', "metadata.a"),
        (b'{"metadata": {"a": [[%s]]}}' % (b"9" * 500), "metadata.a"),
    ],
)
def test_a_number_within_a_field_is_named_by_the_field(body: bytes, name: str) -> None:
    error = error_of(body)
    assert str(error) == f"{name} holds a number that is too large or too long; {RANGE}"
    assert error.param == name


@pytest.mark.parametrize("body", [b"[1e999]", b"1e999", b'{"a": 1e999, b', b'{"a": %s, b' % (b"9" * 500)])
def test_a_number_whose_field_cannot_be_found_has_the_range_still(body: bytes) -> None:
    error = error_of(body)
    assert str(error) == f"the body holds a number that is too large or too long; {RANGE}"
    assert error.param is None


def test_the_field_is_on_the_wire(server: ParrotServer) -> None:
    status, answer = server.post("/v1/completions", b'{"prompt": "a", "temperature": 1e999}')
    assert status == 400
    assert (answer["error"]["param"], answer["error"]["code"]) == ("temperature", "invalid_json")
