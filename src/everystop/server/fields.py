"""Readers of single JSON values: each returns the value, or raises RequestError with field, value and range."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from everystop.core.errors import RequestError, UnsupportedField

Reader = Callable[[str, Any], Any]
_MAX_ECHO = 60
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MAX_ECHO


def echo(value: Any) -> str:
    """The value as the client wrote it, shortened."""
    return _short.repr(value)


def wrong(name: str, value: Any, must: str) -> RequestError:
    """The error for a value that is not what `must` says."""
    return RequestError(f"{name} is {echo(value)}; it must be {must}", param=name, code="invalid_value")


def number(low: float, high: float) -> Reader:
    """A finite number from `low` to `high`."""
    must = f"a number from {low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise wrong(name, value, must)
        assert math.isfinite(value)
        return float(value)

    return read


def integer(low: int, high: int) -> Reader:
    """A whole number from `low` to `high`; true and 1.0 are not whole numbers."""

    def read(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, f"a whole number from {low} to {high}")
        return value

    return read


def within(low: float, high: float) -> Reader:
    """A number between bounds; a whole number where the bounds are."""
    return integer(low, high) if isinstance(low, int) and isinstance(high, int) else number(low, high)


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if type(value) is not bool:
        raise wrong(name, value, "true or false")
    return value


def string(max_chars: int) -> Reader:
    """A text of at most `max_chars` characters."""

    def read(name: str, value: Any) -> str:
        if type(value) is not str:
            raise wrong(name, value, "a string")
        if len(value) > max_chars:
            raise RequestError(f"{name} has {len(value):,} characters; at most {max_chars:,} are taken", param=name)
        return value

    return read


def anything(_name: str, value: Any) -> Any:
    """For fields that are meant for others, or that change nothing here."""
    return value


def only(*allowed: Any, why: str) -> Reader:
    """A known field of which only its neutral values are served."""

    def read(name: str, value: Any) -> Any:
        if not any(type(value) is type(neutral) and value == neutral for neutral in allowed):
            raise UnsupportedField(name, f"{name} = {echo(value)} is not supported: {why}")
        return value

    return read


def stop_strings(max_stops: int, max_chars: int) -> Reader:
    """`stop`: one string or a list of them, none empty."""
    read_one = string(max_chars)

    def read(name: str, value: Any) -> tuple[str, ...]:
        stops = [value] if type(value) is str else value
        if type(stops) is not list or len(stops) > max_stops:
            raise wrong(name, value, f"a string or a list of at most {max_stops} strings")
        for stop in stops:
            if read_one(name, stop) == "":
                raise wrong(name, value, "made of strings that are not empty")
        return tuple(stops)

    return read


def token_ids(max_ids: int) -> Reader:
    """A list of whole numbers; whether they are in the vocabulary is checked later."""

    def read(name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not list or len(value) > max_ids or any(type(token) is not int for token in value):
            raise wrong(name, value, f"a list of at most {max_ids:,} token ids")
        return tuple(value)

    return read


def logit_bias(max_entries: int, max_bias: float) -> Reader:
    """`{"token id": bias}`, each bias from -max_bias to max_bias."""
    read_bias = number(-max_bias, max_bias)

    def read(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if type(value) is not dict or len(value) > max_entries:
            raise wrong(name, value, f"an object with at most {max_entries:,} entries")
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise RequestError(f"{name} has the key {echo(key)}; keys must be token ids", param=name)
            pairs[int(key)] = read_bias(f"{name}[{key}]", bias)
        return tuple(sorted(pairs.items()))

    return read


def read_fields(body: Mapping[str, Any], readers: Mapping[str, Reader], where: str = "") -> dict[str, Any]:
    """The fields that are present and not null; raises for those that `readers` does not know.

    `where` is put before the names in errors, such as "messages[3].".
    """
    values = {}
    for name, value in body.items():
        if value is None:
            continue
        reader = readers.get(name)
        if reader is None:
            path = where + name[:_MAX_ECHO]
            raise UnsupportedField(path, f"unknown field {path!r}; remove it")
        values[name] = reader(where + name, value)
    return values
