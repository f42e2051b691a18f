"""The fields of completions and chat completions: one row a field, by which it is read, described and documented."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS
from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.model.messages import MESSAGES_SCHEMA, read_messages
from everystop.server import fields
from everystop.server.fields import Effect, Field, wrong
from everystop.server.truncation import AS_MANY_AS_FIT

MAX_N = 128
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_PRIORITY = 1000
MAX_STREAM_INTERVAL = 1_000_000
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400

RANGES = SamplingParams.RANGES

Prompt = str | tuple[int, ...]


def _read_prompt(name: str, value: Any) -> tuple[Prompt, ...]:
    """A string, a list of token ids, or a list of either."""
    if type(value) is str:
        return (value,)
    if type(value) is not list or not value:
        raise wrong(name, value, "a string, a list of token ids, or a list of either, and not empty")
    if type(value[0]) is int:
        return (_read_prompt_ids(name, value),)
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"{name} holds {len(value):,} prompts; at most {MAX_PROMPTS:,} are taken",
            param=name,
            code="too_many_sequences",
        )
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


def _length_kept(high: float) -> Field:
    """A whole number from 1 to `high`, or AS_MANY_AS_FIT."""

    def read(name: str, value: Any) -> int:
        if type(value) is not int or not (value == AS_MANY_AS_FIT or 1 <= value <= high):
            raise wrong(name, value, f"a whole number from 1 to {high}, or {AS_MANY_AS_FIT} for as many as fit")
        return value

    return Field(read, {"anyOf": [{"enum": [AS_MANY_AS_FIT]}, fields.within(1, high).schema]})


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
    "stream_options": fields.table(STREAM_OPTION_FIELDS).described("only with `stream`, unless all are `false`"),
    "stream_interval": fields.integer(1, MAX_STREAM_INTERVAL).described(
        "tokens in one chunk of a stream; the first comes at once; more than 1 only with `stream`"
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
    "return_tokens_as_token_ids": fields.boolean().described(
        "`logprobs`, which must be asked for, name tokens as `token_id:7`"
    ),
    "return_token_ids": fields.boolean().described("`prompt_token_ids`, and `token_ids` of each choice or chunk"),
    "truncate_prompt_tokens": _length_kept(RANGES["max_tokens"][1]).described(
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
        "false: nothing is put around the text of the prompt, such as a begin-of-text token (default: true); "
        "nothing is ever put around token ids"
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
