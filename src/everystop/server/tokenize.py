"""`/tokenize` and `/detokenize`: vLLM's shapes, and TGI's where a body has `inputs`; the ids are those that a
completion or a chat of the same text would be answered from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from everystop.core.errors import RequestError
from everystop.core.fitting import check_ids
from everystop.server import fields, json_body, prompts, protocol
from everystop.server.aside import Aside
from everystop.server.bodies import read_body
from everystop.server.errors import Dialect
from everystop.server.fields import Field
from everystop.server.http_counts import announced_bytes
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from everystop.server.state import ServedModel, ServerState
from everystop.server.texts import token_text
from everystop.server.unsent import WholeResponse

MAX_TOKENS = 1 << 20
Work = Callable[[ServedModel, bytes, Scope], bytes]

_ANY_TEXT = fields.string(2**31).read
_CHAT_NAMES = ("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "tools",
               "chat_template_kwargs")  # fmt: skip
_SOURCES = ("prompt", "messages", "inputs")
_ONE_SOURCE = "send either prompt, a text, or messages, a conversation (TGI's clients: inputs, a text)"
TOKENIZE_FIELDS: dict[str, Field] = {
    "model": COMPLETION_FIELDS["model"],
    "prompt": Field(_ANY_TEXT, {"type": "string"}),
    "add_special_tokens": COMPLETION_FIELDS["add_special_tokens"],
    "return_token_strs": fields.boolean().described("the text of each token, in token_strs"),
}
TOKENIZE_CHAT_FIELDS: dict[str, Field] = {name: CHAT_FIELDS[name] for name in _CHAT_NAMES} | {
    "return_token_strs": TOKENIZE_FIELDS["return_token_strs"],
    "chat_template": fields.only(why="the server's own template is used; start it with --chat-template FILE"),
    "media_io_kwargs": fields.only({}, why="only text is read"),
    "mm_processor_kwargs": fields.only({}, why="only text is read"),
}
TGI_TOKENIZE_FIELDS: dict[str, Field] = {
    "inputs": Field(_ANY_TEXT, {"type": "string"}),
    "parameters": fields.only({}, why="they belong to /generate"),
    "add_special_tokens": fields.boolean(),
}
DETOKENIZE_FIELDS: dict[str, Field] = {
    "model": COMPLETION_FIELDS["model"],
    "tokens": fields.token_ids(MAX_TOKENS),
}


class TokenPaths:
    """The two endpoints; large bodies are worked on aside."""

    def __init__(self, state: ServerState, aside: Aside) -> None:
        self._state = state
        self._aside = aside

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        return await self._answer(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        return await self._answer(request, detokenize)

    async def _answer(self, request: Request, work: Work) -> Response:
        """A body that is large, or may be, or whose template takes long, is worked on aside; where there is no room for
        it, it is not read.
        """
        with self._state.visit():
            model, num_bytes = self._state.model, announced_bytes(request.scope["headers"])
            if num_bytes is not None and num_bytes <= prompts.INLINE_BYTES and not model.is_chat_slow():
                body = await read_body(request, lambda num_bytes: None)
                return _json(work(model, body, request.scope))
            self._aside.check()
            with self._aside.bodies.room() as take_room:
                body = await read_body(request, take_room)
                return _json(await self._aside.run(request.scope, partial(work, model, body, request.scope)))


def _json(answer: bytes) -> Response:
    return WholeResponse(answer, media_type="application/json")


def tokenize(model: ServedModel, body: bytes, scope: Scope) -> bytes:
    """The answer to a body of either dialect, which is noted in `scope` for what may go wrong; raises RequestError."""
    given = json_body.parse_json(body)
    is_tgi = given.get("inputs") is not None
    if is_tgi:
        scope["dialect"] = Dialect.TGI
    _check_source(given)
    return msgspec.json.encode(_tgi_tokens(model, given) if is_tgi else _vllm_tokens(model, given))


def _check_source(given: Mapping[str, Any]) -> None:
    """Refuse a body without anything to be tokenized, or with several."""
    named = [name for name in _SOURCES if given.get(name) is not None]
    if not named:
        raise RequestError(f"there is nothing to tokenize; {_ONE_SOURCE}", param="prompt", code="missing_field")
    if len(named) > 1:
        message = f"{' and '.join(named)} are given together; {_ONE_SOURCE}"
        raise RequestError(message, param=named[0], code="conflicting_fields")


def detokenize(model: ServedModel, body: bytes, _scope: Scope) -> bytes:
    """The text of token ids, control tokens written out; raises RequestError."""
    values = fields.read_fields(json_body.parse_json(body), DETOKENIZE_FIELDS)
    protocol.check_model(values.get("model"), model.accepted)
    if "tokens" not in values:
        raise RequestError("tokens is missing", param="tokens", code="missing_field")
    check_ids("tokens", values["tokens"], model.accepted.vocab_size)
    return msgspec.json.encode({"prompt": model.texts.decode(values["tokens"], skip_special_tokens=False)})


def _vllm_tokens(model: ServedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    is_chat = given.get("messages") is not None
    values = fields.read_fields(given, TOKENIZE_CHAT_FIELDS if is_chat else TOKENIZE_FIELDS)
    names = _CHAT_NAMES if is_chat else ("model", "prompt", "add_special_tokens")
    asked = {name: given[name] for name in names if name in given}
    parse = protocol.parse_chat if is_chat else protocol.parse_completion
    ids = prompts.encode(model, parse(asked, model.accepted))[0]
    strings = None
    if values.get("return_token_strs"):
        strings = [token_text(model.texts.token_bytes(token)) for token in ids]
    return {
        "count": len(ids),
        "max_model_len": model.accepted.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def _tgi_tokens(model: ServedModel, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each token with the characters that it stands for; what is put around the text stands for none."""
    values = fields.read_fields(given, TGI_TOKENIZE_FIELDS)
    text: str = values["inputs"]
    prompts.check_length("inputs", len(text), model.accepted.max_model_len)
    spans = model.texts.spans(text, add_special=values.get("add_special_tokens", True))
    return [{"id": token, "text": text[start:stop], "start": start, "stop": stop} for token, start, stop in spans]
