"""Checks what a Python caller hands to `LLM`: a slip in one call is named, and never reaches the engine's thread.

Only types are looked at here, which a body in JSON has by its schema. The ranges are those of `SamplingParams`, and
`core.fitting` says what may stand together, as for the HTTP API.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from everystop.core import fitting
from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams


def check_ids(name: str, ids: Iterable[Any], num_valid_tokens: int) -> tuple[int, ...]:
    """The ids as Python's integers, numpy's included; raises RequestError for what is none of the vocabulary's."""
    numbers = _numbers(name, ids)
    fitting.check_ids(name, numbers, num_valid_tokens)
    return numbers


def _number(name: str, token: Any) -> int:
    return _numbers(name, (token,))[0]


def _numbers(name: str, ids: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, ids))
    except TypeError:
        raise _wrong(name, ids, "made of token ids, which are whole numbers") from None


def checked_params(params: Any, num_valid_tokens: int) -> SamplingParams:
    """The same with all lists as tuples of Python's numbers.

    Raises RequestError for a field of the wrong type or out of range.
    """
    if not isinstance(params, SamplingParams):
        raise _wrong("params", params, "SamplingParams, or a list of them")
    for name, (low, high) in SamplingParams.RANGES.items():
        value = getattr(params, name)
        if value is None and name in SamplingParams.OPTIONAL:
            continue
        kinds, kind = ((int,), "a whole number") if type(low) is int else ((int, float), "a number")
        if type(value) not in kinds or not low <= value <= high:
            raise _wrong(name, value, f"{kind} from {low} to {high}")
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if type(getattr(params, name)) is not bool:
            raise _wrong(name, getattr(params, name), "True or False")
    checked = _with_tuples(params)
    fitting.check_settings(checked, num_valid_tokens)
    return checked


def _with_tuples(params: SamplingParams) -> SamplingParams:
    if not _is_list(params.stop) or not all(type(stop) is str for stop in params.stop):
        raise _wrong("stop", params.stop, "a tuple of strings")
    if not _is_list(params.logit_bias) or not all(map(_is_bias, params.logit_bias)):
        raise _wrong(
            "logit_bias", params.logit_bias, f"pairs of a token id and a number up to ±{SamplingParams.MAX_BIAS:g}"
        )
    if not _is_list(params.bad_word_ids) or not all(_is_list(ids) and ids for ids in params.bad_word_ids):
        raise _wrong("bad_word_ids", params.bad_word_ids, "a tuple of tuples of token ids, none of them empty")
    allowed = params.allowed_token_ids
    return replace(
        params,
        stop=tuple(params.stop),
        logit_bias=tuple((_number("logit_bias", token), float(bias)) for token, bias in params.logit_bias),
        stop_token_ids=_numbers("stop_token_ids", params.stop_token_ids),
        allowed_token_ids=None if allowed is None else _numbers("allowed_token_ids", allowed),
        bad_word_ids=tuple(_numbers("bad_word_ids", ids) for ids in params.bad_word_ids),
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _is_bias(pair: Any) -> bool:
    return (
        _is_list(pair) and len(pair) == 2 and type(pair[1]) in (int, float) and abs(pair[1]) <= SamplingParams.MAX_BIAS
    )


def _wrong(name: str, value: Any, must: str) -> RequestError:
    text = repr(value)
    return RequestError(f"{name} is {text[:60]}{'…' * (len(text) > 60)}; it must be {must}", param=name)
