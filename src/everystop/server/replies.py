"""Writes OpenAI's replies: whole JSON bodies, and server-sent events by template; knows no socket and no engine."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from everystop.server.errors import error_object
from everystop.server.prompt_report import PromptReport
from everystop.server.texts import Part, Piece, TokenInfo, token_text

DONE = b"data: [DONE]\n\n"
NO_MARKS: Mapping[str, str | None] = MappingProxyType({"system_fingerprint": None})


def new_id(prefix: str) -> str:
    """A name for one reply, which nobody can guess."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage_object(
    num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int | None = None
) -> dict[str, Any]:
    """`usage`: a prompt counts once however many choices it has; no details where cached tokens are not known yet."""
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
    if num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
        usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    return usage


class Writer(Protocol):
    """Writes one reply in one dialect, whole or as a stream: the `first_event` of each choice before its first part, an
    `event` for each part, and what has `ended` it, or that it has `failed`.
    """

    id: str

    def attach(self, beside: dict[str, Any]) -> None:
        """Have these fields beside the choices of what is written from now on, instead of those before."""

    def first_event(self, index: int) -> bytes:
        """What opens choice `index`."""

    def event(self, part: Part) -> bytes:
        """The event of a piece or an end."""

    def ended(self, usage: dict[str, Any]) -> bytes:
        """What closes a stream after all its choices."""

    def failed(self, error: Exception) -> bytes:
        """What closes a stream that an error has ended."""

    def whole(self, texts: Sequence[list[Piece]], reasons: Sequence[str], usage: dict[str, Any]) -> bytes:
        """The body of a reply that is not streamed."""


class ReplyWriter:
    """One of OpenAI's replies, its id, time and model; subclasses know the shapes of chat and of completions.

    `marks` are fields of the answer and of each of its chunks, the same from the first to the last. `report` is what
    the client wants to be told of its prompts, and of token ids.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: str,
        *,
        include_usage: bool = False,
        marks: Mapping[str, str | None] = NO_MARKS,
        report: PromptReport | None = None,
    ) -> None:
        self.id = new_id(self.prefix)
        self.created = int(time.time())
        self.model = model
        self._head = (
            f'data: {{"id":"{self.id}","object":"{self.chunk_object}","created":{self.created},'
            f'"model":{json.dumps(model)},{_members(marks)}"choices":['
        )
        self._marks = marks
        self._report = report
        self._include_usage = include_usage
        self._beside: dict[str, Any] = {}
        self._tail = ""
        self.attach({})

    def attach(self, beside: dict[str, Any]) -> None:
        """Have these fields beside the choices of what is written from now on, instead of those before."""
        self._beside = {"usage": None, **beside} if self._include_usage else beside
        self._tail = "]" + "".join(f',"{name}":{json.dumps(value)}' for name, value in self._beside.items()) + "}\n\n"

    def first_event(self, index: int) -> bytes:
        """What opens choice `index` before its first piece."""
        raise NotImplementedError

    def event(self, part: Part) -> bytes:
        """The event of a piece or an end."""
        if part.piece is not None:
            return self.piece_event(part.choice, part.piece)
        assert part.finish_reason is not None
        return self.finish_event(part.choice, part.finish_reason)

    def piece_event(self, index: int, piece: Piece) -> bytes:
        """One piece as one event; characters outside ASCII are escaped, so no client sees a foreign line end."""
        raise NotImplementedError

    def finish_event(self, index: int, reason: str) -> bytes:
        """The end of choice `index`, without text."""
        raise NotImplementedError

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last event before DONE, where the client asked for it."""
        if not self._include_usage:
            return b""
        self.attach({**self._beside, "usage": usage})
        return (self._head + self._tail).encode()

    def ended(self, usage: dict[str, Any]) -> bytes:
        """What closes a stream after all its choices."""
        return self.usage_event(usage) + DONE

    def failed(self, error: Exception) -> bytes:
        """What closes a stream that an error has ended."""
        return f"data: {json.dumps(error_object(error))}\n\n".encode() + DONE

    def whole(self, texts: Sequence[list[Piece]], reasons: Sequence[str], usage: dict[str, Any]) -> bytes:
        """The body of a reply that is not streamed."""
        choices = [self._choice(i, pieces, reasons[i]) for i, pieces in enumerate(texts)]
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": self.whole_object,
                "created": self.created,
                "model": self.model,
                **self._marks,
                "choices": choices,
                **self._of_prompt(),
                **self._beside,
                "usage": usage,
            }
        )

    def _of_prompt(self) -> dict[str, Any]:
        """What an answer that is not streamed says of its one prompt beside the choices."""
        return {}

    def _choice(self, index: int, pieces: list[Piece], reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def _of_pieces(self, *pieces: Piece) -> dict[str, Any]:
        """What a choice says of its own tokens beside text and log-probabilities."""
        return {} if self._report is None else self._report.of_pieces(pieces)

    def _ids_of(self, piece: Piece) -> str:
        """The same for one piece in a stream, as members of its choice."""
        return "" if self._report is None else _members(self._report.of_pieces((piece,)))


class ChatWriter(ReplyWriter):
    """`chat.completion` and its chunks."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, *, logprobs: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self._logprobs = logprobs

    def first_event(self, index: int) -> bytes:
        """The role; and in the same chunk the ids of the prompt, where they are wanted."""
        event = self._event(index, '{"role":"assistant","content":""}', "null", "null")
        of_prompt = {} if self._report is None else self._report.opening(index)
        return event if not of_prompt else event.replace(b"data: {", f"data: {{{_members(of_prompt)}".encode(), 1)

    def piece_event(self, index: int, piece: Piece) -> bytes:
        """A content delta."""
        logprobs = json.dumps(self._logprobs_object(piece.tokens)) if self._logprobs else "null"
        return self._event(index, f'{{"content":{json.dumps(piece.text)}}}', logprobs, "null", self._ids_of(piece))

    def finish_event(self, index: int, reason: str) -> bytes:
        """An empty delta with the reason."""
        return self._event(index, "{}", "null", f'"{reason}"')

    def _event(self, index: int, delta: str, logprobs: str, reason: str, more: str = "") -> bytes:
        choice = f'{{"index":{index},{more}"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return (self._head + choice + self._tail).encode()

    def _of_prompt(self) -> dict[str, Any]:
        return {} if self._report is None else self._report.of_prompt(0)

    def _choice(self, index: int, pieces: list[Piece], reason: str) -> dict[str, Any]:
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": self._logprobs_object(tokens) if self._logprobs else None,
            "finish_reason": reason,
            **self._of_pieces(*pieces),
        }

    def _logprobs_object(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return {
            "content": [
                _chat_token(info.token, info.logprob)
                | {"top_logprobs": [_chat_token(token, logprob) for token, logprob in info.top]}
                for info in tokens
            ],
            "refusal": None,
        }


class CompletionWriter(ReplyWriter):
    """`text_completion`, whole and in chunks; `num_logprobs` is None, or how many alternatives the client asked for."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, *, num_logprobs: int | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._num_logprobs = num_logprobs

    def first_event(self, index: int) -> bytes:
        """The ids of the prompt, where they are wanted; else completions have no opening event."""
        of_prompt = {} if self._report is None else self._report.opening(index)
        return self._event(index, '""', "null", "null", _members(of_prompt)) if of_prompt else b""

    def piece_event(self, index: int, piece: Piece) -> bytes:
        """A piece of text."""
        logprobs = "null" if self._num_logprobs is None else json.dumps(self._logprobs_object(piece.tokens))
        return self._event(index, json.dumps(piece.text), logprobs, "null", self._ids_of(piece))

    def finish_event(self, index: int, reason: str) -> bytes:
        """Empty text with the reason."""
        return self._event(index, '""', "null", f'"{reason}"')

    def _event(self, index: int, text: str, logprobs: str, reason: str, more: str = "") -> bytes:
        choice = f'{{"index":{index},{more}"text":{text},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return (self._head + choice + self._tail).encode()

    def _choice(self, index: int, pieces: list[Piece], reason: str) -> dict[str, Any]:
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": None if self._num_logprobs is None else self._logprobs_object(tokens),
            "finish_reason": reason,
            **({} if self._report is None else self._report.of_prompt(index)),
            **self._of_pieces(*pieces),
        }

    def _logprobs_object(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """Four parallel lists, and the bytes beside them; the chosen token is among its alternatives."""
        return {
            "tokens": [token_text(info.token) for info in tokens],
            "token_logprobs": [info.logprob for info in tokens],
            "top_logprobs": [self._alternatives(info) for info in tokens] if self._num_logprobs else None,
            "text_offset": [info.text_offset for info in tokens],
            "bytes": [list(info.token) for info in tokens],
        }

    def _alternatives(self, info: TokenInfo) -> dict[str, float] | None:
        if info.logprob is None:
            return None
        return {token_text(token): logprob for token, logprob in (*info.top, (info.token, info.logprob))}


def _members(fields: Mapping[str, Any]) -> str:
    """Members of a JSON object, each with a comma behind it."""
    return "".join(f'"{name}":{json.dumps(value)},' for name, value in fields.items())


def _chat_token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token)}
