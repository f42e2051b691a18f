"""Reads the bodies of completions and chat completions: every field is honoured, neutral, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS, NS_PER_MS
from everystop.core.errors import RequestError, UnsupportedField
from everystop.core.request import SamplingParams
from everystop.model.messages import MESSAGES_SCHEMA, read_messages
from everystop.server import fields, json_shape
from everystop.server.errors import ModelUnknown
from everystop.server.fields import Field, wrong

MAX_N = 128
MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PRIORITY = 1000
MAX_USER_CHARS = 256
MAX_JSON_MARKS = 2_000_000
_COUNTED_BYTES = 1 << 18

RANGES = SamplingParams.RANGES

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the served model and the policy allow, and what holds where a request is silent."""

    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    defaults: SamplingParams = field(default_factory=SamplingParams)
    has_priorities: bool = False
    has_targets: bool = False
    names_tenants: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body that can be served; chat has `messages`, completions have `prompts`."""

    params: SamplingParams
    model: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_progress: bool = False
    cache_salt: str = ""
    priority: int = 0
    ttft_target_ns: int | None = None
    itl_target_ns: int | None = None
    user: str = ""


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


def parse_completion(body: Mapping[str, Any], accepted: Accepted) -> Parsed:
    """`POST /v1/completions`; raises RequestError."""
    values = fields.read_fields(body, COMPLETION_FIELDS)
    if "prompt" not in values:
        raise RequestError("prompt is missing", param="prompt", code="missing_field")
    _check_best_of(values)
    parsed = _parse_common(values, accepted, logprobs=values.get("logprobs"), max_tokens=values.get("max_tokens"))
    prompts = values["prompt"]
    for prompt in prompts:
        if not isinstance(prompt, str):
            _check_vocabulary("prompt", prompt, accepted)
    num_sequences = len(prompts) * parsed.params.n
    if num_sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts):,} prompts × n {parsed.params.n} = {num_sequences:,} sequences; "
            f"at most {MAX_SEQUENCES:,} are taken in one request",
            param="n",
        )
    return replace(parsed, prompts=prompts)


def parse_chat(body: Mapping[str, Any], accepted: Accepted) -> Parsed:
    """`POST /v1/chat/completions`; raises RequestError."""
    values = fields.read_fields(body, CHAT_FIELDS)
    if "messages" not in values:
        raise RequestError("messages is missing", param="messages", code="missing_field")
    logprobs = None
    if values.get("logprobs"):
        logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    if values.get("max_tokens", max_tokens) != max_tokens:
        raise RequestError("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    return replace(_parse_common(values, accepted, logprobs, max_tokens), messages=values["messages"])


def _parse_common(values: dict[str, Any], accepted: Accepted, logprobs: int | None, max_tokens: int | None) -> Parsed:
    model = values.get("model", accepted.model_names[0])
    if model not in accepted.model_names:
        raise ModelUnknown(f"the model {model!r} is not served here; {accepted.model_names[0]!r} is", param="model")
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise RequestError("stream_options needs stream = true", param="stream_options")
    stream_options = values.get("stream_options", {})
    chosen = {name: values[name] for name in PARAMETER_FIELDS if name in values}
    params = replace(accepted.defaults, **chosen, max_tokens=max_tokens, logprobs=logprobs)
    _check_parameters(params, accepted)
    return Parsed(
        params=params,
        model=model,
        stream=stream,
        include_usage=stream_options.get("include_usage", False),
        include_progress=stream_options.get("include_progress", False),
        cache_salt=values.get("cache_salt", ""),
        priority=_read_priority(values, accepted),
        ttft_target_ns=_read_target("ttft_target_ms", values, accepted),
        itl_target_ns=_read_target("itl_target_ms", values, accepted),
        user=_read_user(values, accepted),
    )


def _read_priority(values: dict[str, Any], accepted: Accepted) -> int:
    """Lower is more urgent; only 0 where the policy has no priorities."""
    priority: int = values.get("priority", 0)
    if priority and not accepted.has_priorities:
        raise UnsupportedField("priority", f"priority = {priority} needs --policy priority; the policy here has none")
    return priority


def _read_target(name: str, values: dict[str, Any], accepted: Accepted) -> int | None:
    """A target in nanoseconds; None where the request has none, as it must where the policy has none."""
    target_ms: float | None = values.get(name)
    if target_ms is None:
        return None
    if not accepted.has_targets:
        raise UnsupportedField(name, f"{name} = {target_ms:g} needs --policy deadline; the policy here has no targets")
    return round(target_ms * NS_PER_MS)


def _read_user(values: dict[str, Any], accepted: Accepted) -> str:
    """The tenant's name where the server believes this field; else it is anything, and without effect."""
    return fields.string(MAX_USER_CHARS).read("user", values.get("user", "")) if accepted.names_tenants else ""


def _check_parameters(params: SamplingParams, accepted: Accepted) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        message = f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}"
        raise RequestError(message, param="min_tokens")
    _check_vocabulary("logit_bias", [token for token, _ in params.logit_bias], accepted)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, accepted)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), accepted)
    if params.allowed_token_ids == ():
        raise RequestError("allowed_token_ids is empty: no token could be chosen", param="allowed_token_ids")


def _check_vocabulary(name: str, ids: tuple[int, ...] | list[int], accepted: Accepted) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < accepted.vocab_size):
        bad = next(token for token in ids if not 0 <= token < accepted.vocab_size)
        raise RequestError(
            f"{name} holds the token id {bad}; ids must be from 0 to {accepted.vocab_size - 1}",
            param=name,
            code="invalid_token_id",
        )


def _check_best_of(values: dict[str, Any]) -> None:
    if values.get("best_of", values.get("n", 1)) != values.get("n", 1):
        raise UnsupportedField("best_of", "best_of is not supported unless it equals n")


def _read_prompt(name: str, value: Any) -> tuple[Prompt, ...]:
    """A string, a list of token ids, or a list of either."""
    if type(value) is str:
        return (value,)
    if type(value) is not list or not value:
        raise wrong(name, value, "a string, a list of token ids, or a list of either, and not empty")
    if type(value[0]) is int:
        return (_read_prompt_ids(name, value),)
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{name} holds {len(value):,} prompts; at most {MAX_PROMPTS:,} are taken", param=name)
    kind = type(value[0])
    if kind is str and all(type(prompt) is str for prompt in value):
        return tuple(value)
    if kind is list:
        return tuple(_read_prompt_ids(name, prompt) for prompt in value)
    raise wrong(name, value, "a string, a list of token ids, or a list of either")


def _read_prompt_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not list or not value or any(type(token) is not int for token in value):
        raise wrong(name, value, "made of lists of token ids that are not empty")
    return tuple(value)


_PROMPT_IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _PROMPT_IDS_SCHEMA,
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": _PROMPT_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}

STREAM_OPTION_FIELDS: dict[str, Field] = {
    "include_usage": fields.boolean(),
    "include_progress": fields.boolean(),
    "include_obfuscation": fields.no_effect(),
    "continuous_usage_stats": fields.only(False, why="usage comes once, at the end"),
}

PARAMETER_FIELDS: dict[str, Field] = {
    "min_tokens": fields.within(*RANGES["min_tokens"]),
    "temperature": fields.within(*RANGES["temperature"]),
    "top_p": fields.within(*RANGES["top_p"]),
    "top_k": fields.within(-1, RANGES["top_k"][1]).then(lambda top_k: max(0, top_k)),
    "min_p": fields.within(*RANGES["min_p"]),
    "repetition_penalty": fields.within(*RANGES["repetition_penalty"]),
    "presence_penalty": fields.within(*RANGES["presence_penalty"]),
    "frequency_penalty": fields.within(*RANGES["frequency_penalty"]),
    "seed": fields.within(*RANGES["seed"]).then(lambda seed: seed % 2**63),
    "n": fields.integer(1, MAX_N),
    "stop": fields.stop_strings(MAX_STOPS, MAX_STOP_CHARS),
    "stop_token_ids": fields.token_ids(1024),
    "ignore_eos": fields.boolean(),
    "logit_bias": fields.logit_bias(1024, SamplingParams.MAX_BIAS),
    "allowed_token_ids": fields.token_ids(2**20).then(lambda ids: tuple(sorted(set(ids)))),
}
_GREEDY_OR_SAMPLED = "answers are sampled, or greedy at temperature 0"
COMMON_FIELDS: dict[str, Field] = PARAMETER_FIELDS | {
    "model": fields.string(1024),
    "max_tokens": fields.within(*RANGES["max_tokens"]),
    "stream": fields.boolean(),
    "stream_options": fields.table(STREAM_OPTION_FIELDS),
    "cache_salt": fields.string(1024),
    "priority": fields.integer(-MAX_PRIORITY, MAX_PRIORITY),
    "ttft_target_ms": fields.number(MIN_TARGET_MS, MAX_TARGET_MS),
    "itl_target_ms": fields.number(MIN_TARGET_MS, MAX_TARGET_MS),
    "user": fields.no_effect(),
    # without effect here
    "metadata": fields.no_effect(),
    "store": fields.no_effect(),
    "safety_identifier": fields.no_effect(),
    "prompt_cache_key": fields.no_effect(),
    "prompt_cache_retention": fields.no_effect(),
    "service_tier": fields.only("auto", "default", why="there is one tier"),
    # neutral values alone
    "use_beam_search": fields.only(False, why=_GREEDY_OR_SAMPLED),
    "length_penalty": fields.only(1, 1.0, why="it belongs to beam search"),
    "skip_special_tokens": fields.only(True, why="control tokens are never shown"),
    "spaces_between_special_tokens": fields.only(True, why="control tokens are never shown"),
    "include_stop_str_in_output": fields.only(False, why="a stop string is never shown"),
    "prompt_logprobs": fields.only(False, why="logprobs are given for output tokens"),
    "return_tokens_as_token_ids": fields.only(False, why="tokens are given as text and bytes"),
    "return_token_ids": fields.only(False, why="tokens are given as text and bytes"),
    "stream_interval": fields.only(1, why="each token is its own event"),
}
COMPLETION_FIELDS: dict[str, Field] = COMMON_FIELDS | {
    "prompt": Field(_read_prompt, _PROMPT_SCHEMA),
    "logprobs": fields.integer(0, 5),
    "best_of": fields.integer(1, MAX_N),
    "echo": fields.only(False, why="prompts are not repeated"),
    "suffix": fields.only("", why="text is only generated at the end"),
    "add_special_tokens": fields.only(True, why="text gets the model's special tokens; send token ids instead"),
    "response_format": fields.only({"type": "text"}, why="only plain text is generated"),
}
CHAT_FIELDS: dict[str, Field] = COMMON_FIELDS | {
    "messages": Field(lambda name, value: read_messages(value, name), MESSAGES_SCHEMA),
    "max_completion_tokens": fields.within(*RANGES["max_tokens"]),
    "logprobs": fields.boolean(),
    "top_logprobs": fields.within(*RANGES["logprobs"]),
    "tools": fields.only([], why="tools cannot be called"),
    "tool_choice": fields.only("none", "auto", why="tools cannot be called"),
    "parallel_tool_calls": fields.boolean(),
    "functions": fields.only([], why="tools cannot be called"),
    "function_call": fields.only("none", "auto", why="tools cannot be called"),
    "response_format": fields.only({"type": "text"}, why="only plain text is generated"),
    "modalities": fields.only(["text"], why="only text is generated"),
    "verbosity": fields.only("medium", why="the model has no such control"),
    "reasoning_effort": fields.only("none", why="the model has no such control"),
    "add_generation_prompt": fields.only(True, why="the answer is always the assistant's turn"),
    "continue_final_message": fields.only(False, why="the answer is always a new turn"),
    "add_special_tokens": fields.only(False, why="the template alone writes special tokens"),
    "chat_template_kwargs": fields.only({}, why="the template gets the messages alone"),
    "echo": fields.only(False, why="prompts are not repeated"),
}
