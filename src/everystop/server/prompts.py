"""From the bytes of a body to what the engine is asked; pure work, so that large bodies can go to a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.server import protocol
from everystop.server.protocol import Accepted, Parsed
from everystop.server.state import ServedModel

MAX_TOKEN_BYTES = 256  # no token of any vocabulary stands for more characters

Parse = Callable[[dict[str, Any], Accepted], Parsed]


class Prepared(NamedTuple):
    """A request that can be submitted; `prompts` are not empty."""

    parsed: Parsed
    prompts: list[tuple[int, ...]]
    params: SamplingParams


def prepare(model: ServedModel, parse: Parse, body: bytes) -> Prepared:
    """Read a body with `parse` and encode its prompts; raises RequestError."""
    parsed = parse(protocol.parse_json(body), model.accepted)
    prompts = _encode(model, parsed)
    if not all(prompts):
        raise RequestError("the prompt has no tokens; send at least one", param="prompt", code="empty_prompt")
    params = model.texts.with_control_stops(parsed.params)
    return Prepared(parsed, prompts, _with_default_length(params, prompts, model.accepted))


def _encode(model: ServedModel, parsed: Parsed) -> list[tuple[int, ...]]:
    limit = model.accepted.max_model_len
    if parsed.messages:
        _check_length("messages", sum(len(message["content"]) for message in parsed.messages), limit)
        return [tuple(model.encode_chat(parsed.messages, parsed.chat))]
    for prompt in parsed.prompts:
        _check_length("prompt", len(prompt), limit)
    add_special = parsed.add_special_tokens
    return [
        tuple(model.encode(prompt, add_special=add_special)) if isinstance(prompt, str) else prompt
        for prompt in parsed.prompts
    ]


def _check_length(name: str, length: int, limit_tokens: int) -> None:
    """Refuse what cannot fit however it is cut into tokens, before time goes into cutting it."""
    if length > limit_tokens * MAX_TOKEN_BYTES:
        raise RequestError(
            f"{name} has {length:,} characters, far more than {limit_tokens:,} tokens can hold; shorten it",
            param=name,
            code="context_length_exceeded",
        )


def _with_default_length(params: SamplingParams, prompts: list[tuple[int, ...]], accepted: Accepted) -> SamplingParams:
    """Where a request is silent, the model's recommended output length as far as it fits; else all that fits."""
    default = accepted.defaults.max_tokens
    if params.max_tokens is not None or default is None:
        return params
    return replace(params, max_tokens=max(1, min(default, accepted.max_model_len - max(map(len, prompts)))))
