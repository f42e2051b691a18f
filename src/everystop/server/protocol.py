"""Reads the bodies of completions and chat completions: every field is honoured, neutral, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS, NS_PER_MS
from everystop.core.errors import RequestError, UnsupportedField
from everystop.core.request import SamplingParams
from everystop.model.messages import MESSAGES_SCHEMA, PLAIN, ChatOptions, read_messages
from everystop.server import fields, json_shape
from everystop.server.errors import ModelUnknown
from everystop.server.fields import Effect, Field, wrong
from everystop.server.truncation import Truncation, read_truncation
from everystop.server.wishes import NO_WISHES, Wishes, check_sequences, num_scored, read_wishes

MAX_N = 128
MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_PRIORITY = 1000
MAX_USER_CHARS = 256
MAX_STREAM_INTERVAL = 1_000_000
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400
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
    gives_metrics: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body that can be served; chat has `messages`, completions have `prompts`."""

    params: SamplingParams
    model: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    stream: bool = False
    wishes: Wishes = NO_WISHES
    chat: ChatOptions = PLAIN
    add_special_tokens: bool = True
    truncation: Truncation | None = None
    bad_words: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    ttft_target_ns: int | None = None
    itl_target_ns: int | None = None
    timeout_s: float | None = None
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
            check_vocabulary("prompt", prompt, accepted)
    num_sequences = len(prompts) * parsed.params.n
    check_sequences(parsed.wishes, num_sequences)
    if num_sequences > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts):,} prompts × n {parsed.params.n} = {num_sequences:,} sequences; "
            f"at most {MAX_SEQUENCES:,} are taken in one request",
            param="n",
        )
    return replace(parsed, prompts=prompts, add_special_tokens=values.get("add_special_tokens", True))


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
    parsed = _parse_common(values, accepted, logprobs, max_tokens)
    check_sequences(parsed.wishes, parsed.params.n)
    return replace(parsed, messages=values["messages"], chat=_read_chat_options(values))


def _read_chat_options(values: dict[str, Any]) -> ChatOptions:
    continues = values.get("continue_final_message", False)
    opens = values.get("add_generation_prompt", not continues)
    if continues and opens:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true, but an answer either goes on with the "
            "last message or begins a new one; set one of them to false",
            param="continue_final_message",
        )
    return ChatOptions(
        add_generation_prompt=opens,
        continue_final_message=continues,
        add_special_tokens=values.get("add_special_tokens", False),
        variables=values.get("chat_template_kwargs", {}),
    )


def _parse_common(values: dict[str, Any], accepted: Accepted, logprobs: int | None, max_tokens: int | None) -> Parsed:
    model = check_model(values.get("model"), accepted)
    chosen = {name: values[name] for name in PARAMETER_FIELDS if name in values}
    wishes = read_wishes(values, gives_metrics=accepted.gives_metrics)
    params = replace(
        accepted.defaults,
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=num_scored(wishes, logprobs),
    )
    _check_parameters(params, accepted)
    if max_tokens == 0 and not wishes.echo and wishes.prompt_logprobs is None:
        raise RequestError(
            "max_tokens is 0, but nothing is asked of the prompt either; set echo or prompt_logprobs, or ask for at "
            "least one token",
            param="max_tokens",
        )
    if values.get("spaces_between_special_tokens") and not params.skip_special_tokens:
        raise UnsupportedField(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens = true is not supported with skip_special_tokens = false: no blanks are put "
            "between tokens; leave it out",
        )
    return Parsed(
        params=params,
        model=model,
        stream=values.get("stream", False),
        wishes=wishes,
        truncation=read_truncation(values),
        bad_words=values.get("bad_words", ()),
        cache_salt=values.get("cache_salt", ""),
        priority=_read_priority(values, accepted),
        ttft_target_ns=_read_target("ttft_target_ms", values, accepted),
        itl_target_ns=_read_target("itl_target_ms", values, accepted),
        timeout_s=values.get("timeout"),
        user=_read_user(values, accepted),
    )


def check_model(model: str | None, accepted: Accepted) -> str:
    """The served name that is meant; raises ModelUnknown."""
    if model is None:
        return accepted.model_names[0]
    if model not in accepted.model_names:
        raise ModelUnknown(f"the model {model!r} is not served here; {accepted.model_names[0]!r} is", param="model")
    return model


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
    check_vocabulary("logit_bias", [token for token, _ in params.logit_bias], accepted)
    check_vocabulary("stop_token_ids", params.stop_token_ids, accepted)
    check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), accepted)
    if params.allowed_token_ids == ():
        raise RequestError("allowed_token_ids is empty: no token could be chosen", param="allowed_token_ids")


def check_vocabulary(name: str, ids: tuple[int, ...] | list[int], accepted: Accepted) -> None:
    """Raise RequestError for an id that no token has."""
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
    "include_usage": fields.boolean().described("one more chunk with `usage` and no choices before the end"),
    "continuous_usage_stats": fields.boolean().described("`usage` so far in every chunk"),
    "include_progress": fields.boolean().described("comments that say how the request waits, one a second"),
    "include_obfuscation": fields.only(False, why="deltas are sent as they are"),
}

PARAMETER_FIELDS: dict[str, Field] = {
    "min_tokens": fields.within(*RANGES["min_tokens"]).described("no end token and no stop token id before so many"),
    "temperature": fields.within(*RANGES["temperature"]).described("0 is greedy"),
    "top_p": fields.within(*RANGES["top_p"]).described("the most likely tokens that make up so much probability"),
    "top_k": fields.within(-1, RANGES["top_k"][1])
    .then(lambda top_k: max(0, top_k))
    .described("the k most likely tokens; 0 and -1 mean all"),
    "min_p": fields.within(*RANGES["min_p"]).described("at least this share of the most likely token's probability"),
    "repetition_penalty": fields.within(*RANGES["repetition_penalty"]).described("for tokens of prompt and answer"),
    "presence_penalty": fields.within(*RANGES["presence_penalty"]).described("for tokens of the answer, once each"),
    "frequency_penalty": fields.within(*RANGES["frequency_penalty"]).described("for tokens of the answer, each time"),
    "seed": fields.within(*RANGES["seed"])
    .then(lambda seed: seed % 2**63)
    .described("the same seed and prompt give the same answer; counted modulo 2^63"),
    "n": fields.integer(1, MAX_N).described("choices for each prompt; choice k of prompt i has the index i·n + k"),
    "stop": fields.stop_strings(MAX_STOPS, MAX_STOP_CHARS).described(
        "ends the answer, and is not shown; also the text of a control token"
    ),
    "stop_token_ids": fields.token_ids(1024).described("end the answer, and are not shown"),
    "ignore_eos": fields.boolean().described("the model's own end tokens do not end the answer"),
    "logit_bias": fields.logit_bias(1024, SamplingParams.MAX_BIAS).described("added to the logits of these token ids"),
    "allowed_token_ids": fields.token_ids(2**20)
    .then(lambda ids: tuple(sorted(set(ids))))
    .described("no other token is chosen"),
    "skip_special_tokens": fields.boolean().described("false shows control tokens as text (default: true)"),
    "include_stop_str_in_output": fields.boolean().described("the stop that ended the answer is shown"),
}
_GREEDY_OR_SAMPLED = "answers are sampled, or greedy at temperature 0"
_UNCONSTRAINED = "answers are not held to a grammar"
COMMON_FIELDS: dict[str, Field] = PARAMETER_FIELDS | {
    "model": fields.string(1024).described("a served name; without it the first one"),
    "max_tokens": fields.within(*RANGES["max_tokens"]).described(
        "without it as many as fit, or as the model's files say; 0 only with `echo` or `prompt_logprobs`"
    ),
    "stream": fields.boolean().described("server-sent events, at least one a token"),
    "stream_options": fields.table(STREAM_OPTION_FIELDS).described("only with `stream`"),
    "stream_interval": fields.integer(1, MAX_STREAM_INTERVAL).described(
        "tokens in one chunk of a stream; the first comes at once"
    ),
    "spaces_between_special_tokens": fields.boolean().described(
        "false: nothing is put between control tokens, as always; true only where they are not shown"
    ),
    "include_metrics": fields.boolean().described(
        "the object `metrics` beside `usage`; in a stream only with `include_usage`"
    ),
    "timings_per_token": fields.boolean().described("the object `timings` beside `usage`, and in every chunk"),
    "cache_salt": fields.string(1024).described("prefixes are shared only with requests of the same salt"),
    "priority": fields.integer(-MAX_PRIORITY, MAX_PRIORITY).described(
        "lower is earlier; other than 0 only under `--policy priority`"
    ),
    "ttft_target_ms": fields.number(MIN_TARGET_MS, MAX_TARGET_MS).described("only under `--policy deadline`"),
    "itl_target_ms": fields.number(MIN_TARGET_MS, MAX_TARGET_MS).described("only under `--policy deadline`"),
    "timeout": fields.number(MIN_TIMEOUT_S, MAX_TIMEOUT_S).described(
        "seconds from the last byte of the request to the end of the answer; then 504, or an error event in a stream"
    ),
    "user": fields.no_effect().described("names the tenant where the file of `--tenants` says that it may"),
    "metadata": fields.no_effect(),
    "store": fields.no_effect().described("nothing is stored"),
    "safety_identifier": fields.no_effect(),
    "prompt_cache_key": fields.no_effect().described("prefixes are found without it; see `cache_salt`"),
    "prompt_cache_retention": fields.no_effect(),
    "service_tier": fields.only("auto", "default", why="there is one tier; the answer names it `default`"),
    "use_beam_search": fields.only(False, why=_GREEDY_OR_SAMPLED),
    "length_penalty": fields.only(1, why="it belongs to beam search"),
    "early_stopping": fields.only(False, why="it belongs to beam search"),
    "prompt_logprobs": fields.within(*RANGES["prompt_logprobs"]).described(
        "log-probabilities of the prompt's tokens, and of so many others in the place of each; not in a stream"
    ),
    "logprob_token_ids": fields.only([], why="the best tokens are told, not tokens by name"),
    "return_tokens_as_token_ids": fields.boolean().described("`logprobs` name tokens as `token_id:7`"),
    "return_token_ids": fields.boolean().described("`prompt_token_ids`, and `token_ids` of each choice or chunk"),
    "truncate_prompt_tokens": fields.within(-1, RANGES["max_tokens"][1]).described(
        "at most so many tokens of the prompt are kept; -1: as many as fit"
    ),
    "truncation_side": fields.one_of("left", "right").described(
        "where the prompt is cut: `left` keeps its end (the default), `right` its beginning"
    ),
    "bad_words": fields.texts(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS).described(
        "do not come about in the answer, with or without a blank before them"
    ),
    "response_format": fields.only({"type": "text"}, why=_UNCONSTRAINED),
    "structured_outputs": fields.only(why=_UNCONSTRAINED),
    "guided_json": fields.only(why=_UNCONSTRAINED),
    "guided_regex": fields.only(why=_UNCONSTRAINED),
    "guided_choice": fields.only(why=_UNCONSTRAINED),
    "guided_grammar": fields.only(why=_UNCONSTRAINED),
    "request_id": fields.only(why="the header x-request-id names a request"),
}
COMPLETION_FIELDS: dict[str, Field] = COMMON_FIELDS | {
    "prompt": Field(_read_prompt, _PROMPT_SCHEMA).described("text, token ids, or a list of either"),
    "logprobs": fields.within(*RANGES["logprobs"]).described("of the chosen token, and of so many others"),
    "best_of": replace(fields.integer(1, MAX_N), effect=Effect.NEUTRAL_ONLY).described("only equal to `n`"),
    "echo": fields.boolean().described("the prompt before the answer, also in `logprobs`"),
    "suffix": fields.only("", why="text is only generated at the end"),
    "add_special_tokens": fields.boolean().described(
        "false: nothing is put around the text of the prompt, such as a begin-of-text token (default: true)"
    ),
}
CHAT_FIELDS: dict[str, Field] = COMMON_FIELDS | {
    "messages": Field(lambda name, value: read_messages(value, name), MESSAGES_SCHEMA).described(
        "the conversation, its contents text or lists of text parts"
    ),
    "max_completion_tokens": fields.within(*RANGES["max_tokens"]).described("as `max_tokens`"),
    "logprobs": fields.boolean().described("of the chosen tokens"),
    "top_logprobs": fields.within(*RANGES["logprobs"]).described("of so many others; only with `logprobs`"),
    "add_generation_prompt": fields.boolean().described("the prompt opens the assistant's turn (default: true)"),
    "continue_final_message": fields.boolean().described(
        "the answer goes on where the last message ends; not together with `add_generation_prompt`"
    ),
    "add_special_tokens": fields.boolean().described(
        "true: what the model's tokenizer puts around a text is put around the rendered one, begin-of-text once"
    ),
    "chat_template_kwargs": fields.scalars(max_entries=64, max_items=256, max_chars=4096).described(
        "variables that the model's chat template looks at"
    ),
    "tools": fields.only([], why="tools cannot be called"),
    "tool_choice": fields.only("none", "auto", why="tools cannot be called"),
    "parallel_tool_calls": fields.boolean().without_effect().described("tools cannot be called"),
    "functions": fields.only([], why="tools cannot be called"),
    "function_call": fields.only("none", "auto", why="tools cannot be called"),
    "modalities": fields.only(["text"], why="only text is generated"),
    "verbosity": fields.only("medium", why="the model has no such control"),
    "reasoning_effort": fields.only("none", why="the model has no such control"),
    "chat_template": fields.only(why="it is the model's, or that of `--chat-template`"),
    "documents": fields.only(why="the template gets the messages alone"),
    "audio": fields.only(why="only text is generated"),
    "prediction": fields.only(why="answers are not predicted"),
    "web_search_options": fields.only(why="nothing is looked up"),
    "mm_processor_kwargs": fields.only(why="messages hold only text"),
    "echo": fields.only(False, why="messages are not repeated"),
}
