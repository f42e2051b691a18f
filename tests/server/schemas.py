"""The part of JSON Schema that fields use: what is valid, and values near the border of it."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
MOST_ITEMS = 5000  # lists that are made to their full length
TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def is_same(one: Any, other: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    return all(_holds(schema, key, rule, value) for key, rule in schema.items())


def _holds(schema: dict[str, Any], key: str, rule: Any, value: Any) -> bool:
    is_number = type(value) in (int, float)
    match key:
        case "description":
            return True
        case "type":
            return any(type(value) in TYPES[name] for name in ([rule] if isinstance(rule, str) else rule))
        case "anyOf":
            return any(is_valid(one, value) for one in rule)
        case "enum":
            return any(is_same(value, one) for one in rule)
        case "const":
            return is_same(value, rule)
        case "minimum":
            return not is_number or value >= rule
        case "exclusiveMinimum":
            return not is_number or value > rule
        case "maximum":
            return not is_number or value <= rule
        case "minLength":
            return not isinstance(value, str) or len(value) >= rule
        case "maxLength":
            return not isinstance(value, str) or len(value) <= rule
        case "minItems":
            return not isinstance(value, list) or len(value) >= rule
        case "maxItems":
            return not isinstance(value, list) or len(value) <= rule
        case "items":
            return not isinstance(value, list) or all(is_valid(rule, item) for item in value)
        case "maxProperties":
            return not isinstance(value, dict) or len(value) <= rule
        case "required":
            return not isinstance(value, dict) or all(name in value for name in rule)
        case "properties":
            return not isinstance(value, dict) or all(is_valid(rule[k], v) for k, v in value.items() if k in rule)
        case "additionalProperties":
            known = schema.get("properties", {})
            return not isinstance(value, dict) or all(is_valid(rule, v) for k, v in value.items() if k not in known)
        case "propertyNames":
            pattern = rule["pattern"].removesuffix("$") + r"\Z"
            return not isinstance(value, dict) or all(re.search(pattern, name) for name in value)
    raise AssertionError(f"{key} is not known here")


def near(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema takes, and values that it just does not."""
    if not schema or schema.keys() == {"description"}:
        return JSON
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) if schema["enum"] else st.nothing()
    if "const" in schema:
        return st.just(schema["const"])
    if "anyOf" in schema and "type" not in schema:
        return st.one_of([near(one) for one in schema["anyOf"]])
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return st.one_of([_near_kind(kind, schema) for kind in kinds])


def _near_kind(kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -(2**33)))
        high = schema.get("maximum", 2**33)
        whole = st.integers(int(low) - 2, int(high) + 2) | st.sampled_from([low, high])
        return whole if kind == "integer" else whole | st.floats(low - 1, high + 1)
    if kind == "string":
        longest = schema.get("maxLength", 0)
        edges = [longest, longest + 1] if 0 < longest <= MOST_ITEMS else [0]
        return st.text(max_size=8) | st.sampled_from(edges).map(lambda num: "x" * num)
    if kind == "array":
        return _near_array(schema)
    return _near_object(schema)


def _near_array(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    item = near(schema["items"])
    few, most = st.lists(item, max_size=4), schema.get("maxItems", MOST_ITEMS + 1)
    if most > MOST_ITEMS:
        return few
    return few | st.tuples(item, st.sampled_from([most, most + 1])).map(lambda pair: [pair[0]] * pair[1])


def _near_object(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    known = {name: near(one) for name, one in schema.get("properties", {}).items()}
    names = st.from_regex(schema["propertyNames"]["pattern"]) if "propertyNames" in schema else st.text(max_size=5)
    other = schema.get("additionalProperties", {})
    more = st.dictionaries(names, near(other), max_size=2)
    required = {name: known.pop(name) for name in list(known) if name in schema.get("required", ())}
    some = st.tuples(st.fixed_dictionaries(required, optional=known), more).map(lambda pair: pair[1] | pair[0])
    most = schema.get("maxProperties", MOST_ITEMS + 1)
    if most > MOST_ITEMS:
        return some
    full = st.tuples(near(other), st.sampled_from([most, most + 1]))
    return some | full.map(lambda pair: {str(i): pair[0] for i in range(pair[1])})
