"""What each path is for, takes and may answer: the table from which the OpenAPI description is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from everystop.server import answer_schemas as answers
from everystop.server.answer_schemas import Schema
from everystop.server.fields import object_schema
from everystop.server.live import MAX_DIGITS
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from everystop.server.tgi import COMPAT_FIELDS, GENERATE_FIELDS, STREAM_FIELDS
from everystop.server.tokenize import DETOKENIZE_FIELDS, TGI_TOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, TOKENIZE_FIELDS

JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"


class Tag(StrEnum):
    """The groups of paths."""

    OPENAI = "OpenAI"
    TGI = "TGI"
    TOKENS = "Tokens"
    REQUESTS = "Requests"
    OPERATIONS = "Operations"
    DASHBOARD = "Dashboard"


class Parameter(NamedTuple):
    """One parameter behind a path: what it is for and how a wrong one is answered, and what it may be."""

    about: str
    schema: Schema
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `answer` is by media type, what 200 brings; `errors` are the statuses beside those that
    any path may give; `success` are other good statuses; `parameters` describes the parts of the path in braces,
    `query` the parameters behind it by their names: any other is refused.
    """

    tag: Tag
    summary: str
    answer: Mapping[str, Schema]
    body: Schema | None = None
    errors: tuple[int, ...] = ()
    other_answers: Mapping[int, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Parameter] = field(default_factory=dict)


WHY: Mapping[int, str] = {
    400: "The request cannot be honoured; the message says what to change",
    401: "No valid API key came with the request",
    403: "The request comes from a page of another site or under a foreign name of this host, or needs an admin key",
    404: "No such model, request or path",
    409: "As things are it cannot be told; the message says what would change that",
    413: "The body is too large",
    415: "The body is compressed, or says that it is no JSON",
    422: "The request cannot be honoured; the message says what to change",
    424: "The engine gave this request up",
    429: "There is no room for one more; Retry-After says when to come back",
    500: "The server has failed with this request",
    503: "The model is being loaded, the server drains, or the engine has failed",
    504: "The time that the request was given is over",
}
REQUEST_ID: Mapping[str, str] = {"id": "the id of an answer, an x-request-id, or the number of a sequence: 41 or r41"}
WHAT_IF = Parameter(
    "Whether to estimate from the record, too, how long it would have taken otherwise. Anything but true or false, or "
    "more than one value, is 400 invalid_value; true is 403 admin_key_needed for those who do not see all, 409 "
    "not_recorded without a record, 409 no_estimate where it allows none, 429 estimate_running while another is made, "
    "and 504 estimate_timeout beyond a minute",
    answers.FLAG,
)
BEFORE_NS = Parameter(
    "A time of the stream, such as the end of a step, in nanoseconds: what was earlier is told. None, several, or what "
    f"is no whole number of at most {MAX_DIGITS} digits is 400 invalid_value",
    {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1},
    is_required=True,
)
_BODY = (413, 415, 503)
_GENERATION = (*_BODY, 404, 429, 504)
_TGI_GENERATION = (*_BODY, 422, 424, 429, 504)
_GENERATED = {JSON: answers.GENERATED}
_STREAMED = {EVENTS: answers.EVENT}


def _health(summary: str) -> Operation:
    why = "Loading, draining, stuck or failed; no more than the word is said"
    return Operation(tag=Tag.OPERATIONS, summary=summary, answer={JSON: answers.HEALTH}, other_answers={503: why})


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        tag=Tag.OPENAI,
        summary="Answer a conversation",
        body=object_schema(CHAT_FIELDS, ("messages",)),
        answer={JSON: answers.CHAT_COMPLETION, **_STREAMED},
        errors=_GENERATION,
    ),
    ("POST", "/v1/completions"): Operation(
        tag=Tag.OPENAI,
        summary="Continue prompts",
        body=object_schema(COMPLETION_FIELDS, ("prompt",)),
        answer={JSON: answers.COMPLETION, **_STREAMED},
        errors=_GENERATION,
    ),
    ("GET", "/v1/models"): Operation(
        tag=Tag.OPENAI, summary="The served names", answer={JSON: answers.MODELS}, errors=(503,)
    ),
    ("GET", "/v1/models/{name}"): Operation(
        tag=Tag.OPENAI,
        summary="One served name",
        parameters={"name": "a served name"},
        answer={JSON: answers.MODEL},
        errors=(404, 503),
    ),
    ("POST", "/generate"): Operation(
        tag=Tag.TGI,
        summary="Continue a prompt",
        body=object_schema(GENERATE_FIELDS, ("inputs",)),
        answer=_GENERATED,
        errors=_TGI_GENERATION,
    ),
    ("POST", "/generate_stream"): Operation(
        tag=Tag.TGI,
        summary="Continue a prompt, token by token",
        body=object_schema(STREAM_FIELDS, ("inputs",)),
        answer=_STREAMED,
        errors=_TGI_GENERATION,
    ),
    ("POST", "/"): Operation(
        tag=Tag.TGI,
        summary="Continue a prompt, streamed or as a list of one answer",
        body=object_schema(COMPAT_FIELDS, ("inputs",)),
        answer={JSON: answers.listed(answers.GENERATED), **_STREAMED},
        errors=_TGI_GENERATION,
    ),
    ("GET", "/info"): Operation(
        tag=Tag.TGI,
        summary="What is served, and its limits",
        answer={JSON: answers.INFO},
        errors=(422, 503),
    ),
    ("POST", "/tokenize"): Operation(
        tag=Tag.TOKENS,
        summary="The token ids of a prompt or a conversation",
        body={
            "anyOf": [
                object_schema(TOKENIZE_FIELDS, ("prompt",)),
                object_schema(TOKENIZE_CHAT_FIELDS, ("messages",)),
                object_schema(TGI_TOKENIZE_FIELDS, ("inputs",)),
            ]
        },
        answer={JSON: {"anyOf": [answers.TOKENS, answers.PLACED_TOKENS]}},
        errors=(*_BODY, 404, 422, 429),
    ),
    ("POST", "/detokenize"): Operation(
        tag=Tag.TOKENS,
        summary="The text of token ids",
        body=object_schema(DETOKENIZE_FIELDS, ("tokens",)),
        answer={JSON: answers.DETOKENIZED},
        errors=(*_BODY, 404, 429),
    ),
    ("GET", "/v1/requests/{id}"): Operation(
        tag=Tag.REQUESTS,
        summary="Where a request stands",
        parameters=REQUEST_ID,
        answer={JSON: answers.REQUEST_STATE},
        errors=(404,),
    ),
    ("GET", "/v1/requests/{id}/explain"): Operation(
        tag=Tag.REQUESTS,
        summary="Why a request takes, or took, as long as it does",
        parameters=REQUEST_ID,
        query={"what_if": WHAT_IF},
        answer={JSON: answers.EXPLANATION},
        errors=(403, 404, 409, 429, 503, 504),
    ),
    ("GET", "/health"): _health("Whether requests are taken and the engine gets on with them"),
    ("GET", "/health/ready"): _health("The same as /health"),
    ("GET", "/health/live"): _health("Whether the process gets on, or must be replaced"),
    ("GET", "/version"): Operation(tag=Tag.OPERATIONS, summary="The server's version", answer={JSON: answers.VERSION}),
    ("GET", "/metrics"): Operation(
        tag=Tag.OPERATIONS, summary="Metrics in Prometheus' text format", answer={PLAIN: answers.TEXT}
    ),
    ("GET", "/openapi.json"): Operation(
        tag=Tag.OPERATIONS, summary="This description", answer={JSON: answers.ANY_OBJECT}
    ),
    ("GET", "/ui/stream"): Operation(
        tag=Tag.DASHBOARD, summary="What happens in the engine, without end", answer=_STREAMED, errors=(429, 503)
    ),
    ("GET", "/ui/past"): Operation(
        tag=Tag.DASHBOARD,
        summary="What the stream told before the time `before_ns`, at most 30 s of it",
        query={"before_ns": BEFORE_NS},
        answer={JSON: answers.ANY_OBJECT},
        errors=(429, 503),
    ),
}
