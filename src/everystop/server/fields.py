"""Fields of a request's body: how each is read, its JSON schema, and what it does here; one row a field.

A reader returns the value, or raises RequestError with field, value and range. Reader and schema are made together from
the same bounds, so that they cannot disagree; the one difference is that 1.0 is no whole number to a reader.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from everystop.core.errors import RequestError, UnsupportedField

Reader = Callable[[str, Any], Any]
_MAX_ECHO = 60


class _Short(reprlib.Repr):
    """Shortens without sorting the keys of an object, of which there may be very many."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_short = _Short()
_TOKEN_ID = re.compile("(0|[1-9][0-9]{0,9})")  # one spelling a number: two keys must not mean one token
_short.maxstring = _short.maxother = _short.maxlong = _MAX_ECHO


class Effect(StrEnum):
    """What a known field does."""

    HONOURED = "honoured"
    NO_EFFECT = "accepted without effect"
    NEUTRAL_ONLY = "neutral value only"


@dataclass(frozen=True, slots=True)
class Field:
    """One field: `read(name, value)` gives the value that is used, `schema` says in JSON Schema what `read` takes.

    The schema's `description` is the field's line in the documentation. null is not in the schema: it means absent.
    """

    read: Reader
    schema: dict[str, Any]
    effect: Effect = Effect.HONOURED

    def described(self, text: str) -> Field:
        """The same field with a line of documentation."""
        return replace(self, schema={**self.schema, "description": text})

    def without_effect(self) -> Field:
        """The same field, which is read and changes nothing."""
        return replace(self, effect=Effect.NO_EFFECT)

    def then(self, change: Callable[[Any], Any]) -> Field:
        """The same field, whose value is changed after it has been read."""
        read = self.read
        return replace(self, read=lambda name, value: change(read(name, value)))


def echo(value: Any) -> str:
    """The value as the client wrote it, shortened."""
    return _short.repr(value)


def wrong(name: str, value: Any, must: str) -> RequestError:
    """The error for a value that is not what `must` says."""
    return RequestError(f"{name} is {echo(value)}; it must be {must}", param=name, code="invalid_value")


def number(low: float, high: float) -> Field:
    """A finite number from `low` to `high`."""
    must = f"a number from {low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise wrong(name, value, must)
        assert math.isfinite(value)
        return float(value)

    return Field(read, {"type": "number", "minimum": low, "maximum": high})


def integer(low: int, high: int) -> Field:
    """A whole number from `low` to `high`; true and 1.0 are not whole numbers."""

    def read(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, value, f"a whole number from {low} to {high}")
        return value

    return Field(read, {"type": "integer", "minimum": low, "maximum": high})


def within(low: float, high: float) -> Field:
    """A number between bounds; a whole number where the bounds are."""
    return integer(low, high) if isinstance(low, int) and isinstance(high, int) else number(low, high)


def boolean() -> Field:
    """true or false."""

    def read(name: str, value: Any) -> bool:
        if type(value) is not bool:
            raise wrong(name, value, "true or false")
        return value

    return Field(read, {"type": "boolean"})


def string(max_chars: int) -> Field:
    """A text of at most `max_chars` characters."""

    def read(name: str, value: Any) -> str:
        if type(value) is not str:
            raise wrong(name, value, "a string")
        if len(value) > max_chars:
            message = f"{name} has {len(value):,} characters; at most {max_chars:,} are taken"
            raise RequestError(message, param=name, code="invalid_value")
        return value

    return Field(read, {"type": "string", "maxLength": max_chars})


def one_of(*values: str) -> Field:
    """One of these words."""
    must = " or ".join(f'"{value}"' for value in values)

    def read(name: str, value: Any) -> str:
        if type(value) is not str or value not in values:
            raise wrong(name, value, must)
        return value

    return Field(read, {"enum": list(values)})


def texts(max_items: int, max_chars: int) -> Field:
    """A list of texts, each of at most `max_chars` characters."""
    one = string(max_chars)

    def read(name: str, value: Any) -> tuple[str, ...]:
        if type(value) is not list or len(value) > max_items:
            raise wrong(name, value, f"a list of at most {max_items:,} strings")
        return tuple(one.read(name, item) for item in value)

    return Field(read, {"type": "array", "items": one.schema, "maxItems": max_items})


def no_effect() -> Field:
    """Any value: the field is meant for others, or changes nothing here."""
    return Field(lambda name, value: value, {}, Effect.NO_EFFECT)


def only(*allowed: Any, why: str) -> Field:
    """A known field of which only its neutral values are served, besides null."""

    def read(name: str, value: Any) -> Any:
        if not any(_is_same(value, neutral) for neutral in allowed):
            raise UnsupportedField(name, f"{name} = {echo(value)} is not supported: {why}")
        return value

    return Field(read, {"enum": list(allowed or (None,)), "description": why}, Effect.NEUTRAL_ONLY)


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    return (type(value) is bool) == (type(neutral) is bool) and bool(value == neutral)


def stop_strings(max_stops: int, max_chars: int) -> Field:
    """`stop`: one string or a list of them, none empty."""
    one = string(max_chars)

    def read(name: str, value: Any) -> tuple[str, ...]:
        stops = [value] if type(value) is str else value
        if type(stops) is not list or len(stops) > max_stops:
            raise wrong(name, value, f"a string or a list of at most {max_stops} strings")
        for stop in stops:
            if one.read(name, stop) == "":
                raise wrong(name, value, "made of strings that are not empty")
        return tuple(stops)

    schema = {**one.schema, "minLength": 1}
    return Field(read, {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": max_stops}]})


def token_ids(max_ids: int) -> Field:
    """A list of whole numbers; whether they are in the vocabulary is checked later."""

    def read(name: str, value: Any) -> tuple[int, ...]:
        if type(value) is not list or len(value) > max_ids or any(type(token) is not int for token in value):
            raise wrong(name, value, f"a list of at most {max_ids:,} token ids")
        return tuple(value)

    return Field(read, {"type": "array", "items": {"type": "integer"}, "maxItems": max_ids})


def logit_bias(max_entries: int, max_bias: float) -> Field:
    """`{"token id": bias}`, each bias from -max_bias to max_bias."""
    one = number(-max_bias, max_bias)

    def read(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if type(value) is not dict or len(value) > max_entries:
            raise wrong(name, value, f"an object with at most {max_entries:,} entries")
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            if _TOKEN_ID.fullmatch(key) is None:
                raise RequestError(
                    f"{name} has the key {echo(key)}; keys must be token ids, in plain decimal digits",
                    param=name,
                    code="invalid_value",
                )
            pairs[int(key)] = one.read(f"{name}[{key}]", bias)
        return tuple(sorted(pairs.items()))

    schema = {"type": "object", "maxProperties": max_entries, "propertyNames": {"pattern": f"^{_TOKEN_ID.pattern}$"}}
    return Field(read, {**schema, "additionalProperties": one.schema})


def scalars(*, max_entries: int, max_items: int, max_chars: int) -> Field:
    """An object of texts, numbers, booleans, and lists of them; what is null in it is absent."""

    def is_scalar(value: Any) -> bool:
        return type(value) in (bool, int, float) or (type(value) is str and len(value) <= max_chars)

    def read(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > max_entries:
            raise wrong(name, value, f"an object with at most {max_entries:,} entries")
        for key, item in value.items():
            is_list = type(item) is list and len(item) <= max_items and all(map(is_scalar, item))
            if item is not None and not is_list and not is_scalar(item):
                must = f"a number, a boolean, a text of at most {max_chars:,} characters, or a list of them of at most "
                raise wrong(f"{name}.{key[:_MAX_ECHO]}", item, f"{must}{max_items:,}")
        return {key: item for key, item in value.items() if item is not None}

    one: dict[str, Any] = {"anyOf": [{"type": ["boolean", "number"]}, {"type": "string", "maxLength": max_chars}]}
    anything = {"anyOf": [one, {"type": "array", "items": one, "maxItems": max_items}, {"type": "null"}]}
    return Field(read, {"type": "object", "maxProperties": max_entries, "additionalProperties": anything})


def table(rows: Mapping[str, Field]) -> Field:
    """An object whose fields are read by `rows`."""

    def read(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong(name, value, "an object")
        return read_fields(value, rows, f"{name}.")

    return Field(read, object_schema(rows))


def read_fields(body: Mapping[str, Any], rows: Mapping[str, Field], where: str = "") -> dict[str, Any]:
    """The fields that are present and not null; raises for those that `rows` does not know.

    `where` is put before the names in errors, such as "messages[3].".
    """
    values = {}
    for name, value in body.items():
        if value is None:
            continue
        row = rows.get(name)
        if row is None:
            path = where + name[:_MAX_ECHO]
            raise UnsupportedField(path, f"unknown field {path!r}; remove it")
        values[name] = row.read(where + name, value)
    return values


def object_schema(rows: Mapping[str, Field], required: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON schema of the bodies that `read_fields` takes.

    A field that is not `required` may be null, and so may one that nobody knows.
    """
    properties = {
        name: row.schema if name in required or not row.schema else {"anyOf": [row.schema, {"type": "null"}]}
        for name, row in rows.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": {"type": "null"}}
    return schema | ({"required": list(required)} if required else {})
