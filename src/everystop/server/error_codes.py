"""The codes of errors on the wire, each with its HTTP status and what it means: machine-readable, and stable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Meaning(NamedTuple):
    """When a code is sent."""

    status: int
    when: str


CODES: Mapping[str, Meaning] = {
    "invalid_http": Meaning(400, "what came is no HTTP request, or one whose end cannot be known"),
    "invalid_host": Meaning(400, "no `Host` header, several, or one that is no host"),
    "invalid_request_id": Meaning(400, "`x-request-id` is too long, not printable ASCII, or there are several"),
    "invalid_json": Meaning(400, "the body is no JSON object, names a key twice, or is nested too deeply"),
    "body_too_complex": Meaning(400, "the body's JSON holds too many values"),
    "missing_field": Meaning(400, "a field that is needed is not there"),
    "unsupported_field": Meaning(400, "a field, a parameter or a value is unknown or not served"),
    "invalid_value": Meaning(400, "a value is of the wrong type, out of range or too long"),
    "conflicting_fields": Meaning(400, "two fields cannot both be honoured, or one needs another"),
    "invalid_token_id": Meaning(400, "a token id that the vocabulary does not have"),
    "no_token_allowed": Meaning(400, "the settings leave no token that could be the first"),
    "empty_prompt": Meaning(400, "the prompt has no tokens"),
    "context_length_exceeded": Meaning(400, "prompt and answer do not fit into the context or the KV cache"),
    "too_many_sequences": Meaning(400, "prompts times choices are more than may be asked for, or run and wait"),
    "too_many_choices": Meaning(400, "`n` is more than the tenant may have running and waiting"),
    "too_many_tokens": Meaning(400, "the prompts together have more tokens than may wait"),
    "too_many_logprobs": Meaning(400, "log-probabilities or token ids would be too many for one answer"),
    "invalid_text": Meaning(400, "the text is no valid Unicode"),
    "chat_template_missing": Meaning(400, "the model brings no chat template"),
    "chat_template_error": Meaning(400, "the chat template refuses the messages, or fails on them"),
    "invalid_api_key": Meaning(401, "no valid key, or several"),
    "origin_not_allowed": Meaning(403, "without keys: a page of another origin sent it"),
    "host_not_allowed": Meaning(403, "without keys: a host name that is not this server's"),
    "admin_key_needed": Meaning(403, "only administrators may have this: it tells of all requests"),
    "not_found": Meaning(404, "no such path"),
    "model_not_found": Meaning(404, "no such model"),
    "request_not_found": Meaning(404, "no such request, or none that the caller may see"),
    "method_not_allowed": Meaning(405, "the path does not take that method; `Allow` names those it takes"),
    "receive_timeout": Meaning(408, "the request was not there in time"),
    "not_recorded": Meaning(409, "estimates need a record, and the server writes none, or not any more"),
    "no_estimate": Meaning(409, "the request has no end of its own yet, or the record does not do for an estimate"),
    "body_too_large": Meaning(413, "the body is larger than is ever taken"),
    "unsupported_content_encoding": Meaning(415, "the body is compressed, or otherwise encoded"),
    "unsupported_content_type": Meaning(415, "the body says that it is no JSON, or not in UTF-8"),
    "queue_full": Meaning(429, "too much waits for a place to run"),
    "tenant_queue_full": Meaning(429, "too many requests of this tenant wait"),
    "bodies_full": Meaning(429, "too many bytes of bodies are being received"),
    "aside_full": Meaning(429, "too much of what generates nothing, such as `/tokenize`, is being worked on"),
    "estimate_running": Meaning(429, "another estimate is being made"),
    "too_many_readers": Meaning(429, "too many watch `/ui/stream`, or ask `/ui/past` at once"),
    "headers_too_large": Meaning(431, "target and headers are too large"),
    "generation_failed": Meaning(500, "this request failed alone, such as for numbers that overflowed"),
    "server_error": Meaning(500, "a fault of the server"),
    "too_many_connections": Meaning(503, "all connections that there may be have requests"),
    "loading": Meaning(503, "the model is being loaded"),
    "draining": Meaning(503, "the server is shutting down"),
    "engine_failed": Meaning(503, "the engine has failed"),
    "request_timeout": Meaning(504, "the time of the request was over before anything was sent"),
    "estimate_timeout": Meaning(504, "the record is too long to be simulated in time"),
    "http_version_not_supported": Meaning(505, "another version of HTTP than 1.0 and 1.1"),
}
