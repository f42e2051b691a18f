"""What is wrong with a body that cannot be decoded, in words that help; looked for only where something is."""

from __future__ import annotations

import re

import msgspec

from everystop.core.errors import RequestError
from everystop.server.json_shape import MAX_DIGITS, has_long_number

_MAX_ECHO = 60
_MAX_NUMBER_ECHO = 20
_MAX_NAMES = 2  # such as parameters.temperature
_SEARCHED_BYTES = 1 << 20
_CUT_OFF = "Input data was truncated"  # the decoder's word, also for a surrogate without its other half
_NOT_UTF8 = "Invalid UTF-8 encoded string"
_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def not_json(body: bytes, error: msgspec.DecodeError) -> RequestError:
    """The error for a body that the decoder refused with `error`."""
    return RequestError(_reason(body, str(error)), code="invalid_json")


def _reason(body: bytes, said: str) -> str:
    if not body.strip():
        return "the body is empty; send a JSON object"
    if said == _NOT_UTF8:
        return f"the body is not valid JSON: a text is not UTF-8{_place_of_broken_utf8(body)}"
    if said == _CUT_OFF or "surrogate" in said:
        lone = _lone_surrogate(body)
        if lone is not None:
            return (
                f"the body is not valid JSON: the escape {lone[0].decode()} at byte {lone.start():,} is half of a "
                "surrogate pair without the other; send both, or the character itself"
            )
    if said == _CUT_OFF:
        return f"the body is not valid JSON: it ends after {len(body):,} bytes, before its JSON does"
    return f"the body is not valid JSON: {said}"


def _lone_surrogate(body: bytes) -> re.Match[bytes] | None:
    escapes = _SURROGATES.finditer(body, 0, _SEARCHED_BYTES)
    return next((escape for escape in escapes if escape["lone"]), None)


def _place_of_broken_utf8(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f" at byte {error.start:,}"
    return ""


def number_refused(body: bytes) -> RequestError:
    """The error for a body with a number that is too large or too long, and the field that it stands in."""
    name, number = _refused_number(body)
    what = f"{name} is {_short(number)}, which" if number else f"{name or 'the body'} holds a number that"
    return RequestError(
        f"{what} is too large or too long; numbers must be from -1.8e308 to 1.8e308, and have at most {MAX_DIGITS} "
        "digits",
        param=name or None,
        code="invalid_json",
    )


def _refused_number(body: bytes) -> tuple[str, str]:
    """The field's name, as far as it is an object's, and the number, if it is the field itself; else ""."""
    names: list[str] = []
    raw = body
    while len(names) < _MAX_NAMES and raw.lstrip().startswith(b"{"):
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:  # what stands behind the number is no JSON
            break
        found = next(((name, bytes(value)) for name, value in fields.items() if _is_refused(bytes(value))), None)
        if found is None:
            break
        names.append(found[0][:_MAX_ECHO])
        raw = found[1]
    is_number = bool(names) and raw.strip()[:1] in b"-0123456789"
    return ".".join(names), raw.decode() if is_number else ""


def _is_refused(raw: bytes) -> bool:
    if len(raw) > MAX_DIGITS and has_long_number(raw):
        return True
    try:
        msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return True
    except msgspec.DecodeError:
        return False
    return False


def _short(number: str) -> str:
    return number if len(number) <= _MAX_NUMBER_ECHO else f"{number[:_MAX_NUMBER_ECHO]}…"
