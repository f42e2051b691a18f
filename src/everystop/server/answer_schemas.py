"""JSON schemas of what is answered: the fields that every answer of a kind has; more may come beside them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

COUNT: Schema = {"type": "integer", "minimum": 0}
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
EVENT: Schema = {  # one of server-sent events
    "type": "object",
    "properties": {"data": {"type": "string", "description": "JSON, or [DONE]"}},
    "required": ["data"],
}


def of(**properties: Schema) -> Schema:
    """An object that has these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def listed(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def word(*words: str) -> Schema:
    """One of these."""
    return {"type": "string", "enum": list(words)}


ERROR = of(error=of(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT)))
TGI_ERROR = of(error=TEXT, error_type=TEXT)

_USAGE = of(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=of(cached_tokens=COUNT),
)
_REASON = or_null(word("stop", "length"))
_MESSAGE = of(role=TEXT, content=TEXT)
_CHAT_CHOICE = of(index=COUNT, message=_MESSAGE, logprobs=or_null(ANY_OBJECT), finish_reason=_REASON)
_TEXT_CHOICE = of(index=COUNT, text=TEXT, logprobs=or_null(ANY_OBJECT), finish_reason=_REASON)


def _reply(kind: str, choice: Schema) -> Schema:
    return of(id=TEXT, object=word(kind), created=COUNT, model=TEXT, choices=listed(choice), usage=_USAGE)


COMPLETION = _reply("text_completion", _TEXT_CHOICE)
CHAT_COMPLETION = _reply("chat.completion", _CHAT_CHOICE)
MODEL = of(id=TEXT, object=word("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)
MODELS = of(object=word("list"), data=listed(MODEL))
HEALTH = of(status=TEXT)
VERSION = of(version=TEXT)

TOKENS = of(count=COUNT, max_model_len=COUNT, tokens=listed(COUNT), token_strs=or_null(listed(TEXT)))
PLACED_TOKENS = listed(of(id=COUNT, text=TEXT, start=COUNT, stop=COUNT))
DETOKENIZED = of(prompt=TEXT)

_TGI_TOKEN = of(id=COUNT, text=TEXT, logprob=NUMBER, special=FLAG)
_TGI_DETAILS = of(
    finish_reason=word("length", "eos_token", "stop_sequence"),
    generated_tokens=COUNT,
    seed=or_null(COUNT),
    prefill=listed(of(id=COUNT, text=TEXT, logprob=or_null(NUMBER))),
    tokens=listed(_TGI_TOKEN),
)
GENERATED: Schema = {
    "type": "object",
    "properties": {"generated_text": TEXT, "details": _TGI_DETAILS},
    "required": ["generated_text"],
}
INFO = of(
    model_id=TEXT,
    max_concurrent_requests=COUNT,
    max_best_of=COUNT,
    max_stop_sequences=COUNT,
    max_input_tokens=COUNT,
    max_total_tokens=COUNT,
    validation_workers=COUNT,
    max_client_batch_size=COUNT,
    router=TEXT,
    version=TEXT,
)

REQUEST_STATE = of(
    id=TEXT,
    object=word("request"),
    x_request_id=or_null(TEXT),
    state=TEXT,
    num_sequences=COUNT,
    num_waiting_sequences=COUNT,
    elapsed_ns=COUNT,
    waiting=or_null(ANY_OBJECT),
)
EXPLANATION = of(id=TEXT, state=TEXT, e2e_ns=COUNT, causes=listed(ANY_OBJECT), segments=listed(ANY_OBJECT))
