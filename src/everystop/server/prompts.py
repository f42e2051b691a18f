"""From the bytes of a body to what the engine is asked; pure work, so that large bodies can go to a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from everystop.core.errors import RequestError
from everystop.core.fitting import check_fits
from everystop.core.request import SamplingParams
from everystop.model.bad_words import bad_word_ids
from everystop.server import json_body
from everystop.server.answer_size import check_size
from everystop.server.field_names import in_names
from everystop.server.protocol import Accepted, Parsed
from everystop.server.state import ServedModel

PREPARE_WORKERS = 2  # threads for bodies that are too large for the event loop
INLINE_BYTES = 8192  # of a body that is prepared on it
MAX_TOKEN_BYTES = 256  # no token of any vocabulary stands for more characters

Parse = Callable[[dict[str, Any], Accepted], Parsed]
Admit = Callable[[Parsed, int], None]


class Prepared(NamedTuple):
    """A request that can be submitted; `prompts` are not empty."""

    parsed: Parsed
    prompts: list[tuple[int, ...]]
    params: SamplingParams


def prepare(model: ServedModel, parse: Parse, body: bytes, admit: Admit = lambda parsed, num_prompts: None) -> Prepared:
    """Read a body with `parse` and encode its prompts; raises RequestError.

    `admit` hears what it asks for, and for how many prompts, before any is rendered or encoded, and may raise.
    """
    parsed = parse(json_body.parse_json(body), model.accepted)
    try:
        return _prepare(model, parsed, admit)
    except RequestError as error:
        raise in_names(error, parsed.names) from None


def _prepare(model: ServedModel, parsed: Parsed, admit: Admit) -> Prepared:
    admit(parsed, max(1, len(parsed.prompts)))
    prompts = encode(model, parsed)
    if not all(prompts):
        raise RequestError("the prompt has no tokens; send at least one", param="prompt", code="empty_prompt")
    params = model.texts.with_control_stops(parsed.params)
    if parsed.bad_words:
        spell = partial(model.encode, add_special=False)
        params = replace(params, bad_word_ids=bad_word_ids(parsed.bad_words, spell))
    params = _with_default_length(params, prompts, model)
    granted = [
        check_fits(len(prompt), params.max_tokens, model.limit_tokens, min_tokens=params.min_tokens)
        for prompt in prompts
    ]
    check_size(parsed, params, prompts, granted)
    return Prepared(parsed, prompts, params)


def encode(model: ServedModel, parsed: Parsed) -> list[tuple[int, ...]]:
    """The token ids of each prompt, or of the conversation, as far as they are to be kept; raises RequestError."""
    limit = model.accepted.max_model_len
    if parsed.messages:
        check_length("messages", sum(len(message["content"]) for message in parsed.messages), limit)
        return [_cut(model, parsed, tuple(model.encode_chat(parsed.messages, parsed.chat)), is_text=True)]
    for prompt in parsed.prompts:
        check_length(parsed.prompt_name, len(prompt), limit)
    add_special = parsed.add_special_tokens
    return [
        _cut(model, parsed, tuple(model.encode(prompt, add_special=add_special)), is_text=True)
        if isinstance(prompt, str)
        else _cut(model, parsed, prompt, is_text=False)
        for prompt in parsed.prompts
    ]


def _cut(model: ServedModel, parsed: Parsed, prompt: tuple[int, ...], *, is_text: bool) -> tuple[int, ...]:
    """What is kept of a prompt; what the tokenizer puts before a text stays there."""
    if parsed.truncation is None:
        return prompt
    num_output = max(1, parsed.params.max_tokens or parsed.params.min_tokens)
    num_fitting = max(1, model.limit_tokens - num_output)
    return parsed.truncation.cut(prompt, num_fitting, model.encode("", add_special=True) if is_text else ())


def check_length(name: str, length: int, limit_tokens: int) -> None:
    """Refuse what cannot fit however it is cut into tokens, before time goes into cutting it."""
    if length > limit_tokens * MAX_TOKEN_BYTES:
        raise RequestError(
            f"{name} has {length:,} characters, far more than {limit_tokens:,} tokens can hold; shorten it",
            param=name,
            code="context_length_exceeded",
        )


def _with_default_length(params: SamplingParams, prompts: list[tuple[int, ...]], model: ServedModel) -> SamplingParams:
    """Where a request is silent, the model's recommended output length, or `min_tokens` if that is more, as far as it
    fits; else all that fits.
    """
    default, num_left = model.accepted.defaults.max_tokens, model.limit_tokens - max(map(len, prompts))
    if params.max_tokens is not None or default is None or params.min_tokens > num_left:
        return params
    return replace(params, max_tokens=max(1, min(max(default, params.min_tokens), num_left)))
