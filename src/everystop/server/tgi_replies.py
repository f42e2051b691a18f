"""Writes TGI's replies: one JSON body, or an event a token; knows no socket and no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from everystop.server.board import Generation
from everystop.server.errors import Dialect, error_object
from everystop.server.replies import new_id
from everystop.server.texts import Part, Piece, ShownToken, TextEnd, TokenText
from everystop.server.tgi import TgiOptions


class TgiWriter:
    """`GenerateResponse` and `StreamResponse` of one generation; the seed is null where nothing was drawn."""

    def __init__(self, options: TgiOptions, generation: Generation) -> None:
        self.id = new_id("gen")
        self._options = options
        self._num_prompt_tokens = generation.num_prompt_tokens
        self._report = generation.report
        drawn = generation.seed if options.seed is None else options.seed
        self._seed = drawn if options.samples else None
        self._num_told = 0

    def attach(self, beside: dict[str, Any]) -> None:
        """TGI has nothing beside its answers, and its clients cannot ask for it."""
        assert not beside

    def first_event(self, index: int) -> bytes:
        """Nothing comes before the first token."""
        return b""

    def event(self, part: Part) -> bytes:
        """One token, counted from 1, with the last one the whole text; nothing for an end, which that has said."""
        if part.piece is None:
            return b""
        told = _told(part.piece)
        self._num_told += 1
        top = f'"top_tokens":{json.dumps([_token(one) for one in told.top])},' if self._options.num_top else ""
        text, details = "null", "null"
        if told.end is not None:
            text = json.dumps(self._options.prompt + told.end.text)
            details = json.dumps(self._stream_details(told.end)) if self._options.details else "null"
        token = json.dumps(_token(told.shown))
        return (
            f'data:{{"index":{self._num_told},"token":{token},{top}"generated_text":{text},"details":{details}}}\n\n'
        ).encode()

    def ended(self, usage: dict[str, Any]) -> bytes:
        """Nothing: TGI's streams end with the last token."""
        return b""

    def failed(self, error: Exception) -> bytes:
        """TGI's error as the last event."""
        return f"data:{json.dumps(error_object(error, Dialect.TGI))}\n\n".encode()

    def whole(self, texts: Sequence[list[Piece]], reasons: Sequence[str], usage: dict[str, Any]) -> bytes:
        """The likeliest of the choices; with details the others stand beside it."""
        choices = [[_told(piece) for piece in pieces] for pieces in texts]
        best = max(range(len(choices)), key=lambda i: _mean_logprob(choices[i]))
        answer: dict[str, Any] = {"generated_text": self._text(choices[best])}
        if self._options.details:
            answer["details"] = self._details(best, choices[best])
            if len(choices) > 1:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(tokens), **self._details(i, tokens)}
                    for i, tokens in enumerate(choices)
                    if i != best
                ]
        return msgspec.json.encode([answer] if self._options.is_listed else answer)

    def _text(self, tokens: Sequence[TokenText]) -> str:
        return self._options.prompt + _end(tokens).text

    def _details(self, index: int, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """The seed gives choice 0 again, so the others name none."""
        end = _end(tokens)
        prompt = self._report.tokens_of(index) if self._report is not None else []
        details: dict[str, Any] = {
            "finish_reason": end.reason,
            "generated_tokens": end.num_tokens,
            "seed": self._seed if index == 0 else None,
            "prefill": [{"id": one.token_id, "text": one.text, "logprob": one.logprob} for one in prompt],
            "tokens": [_token(token.shown) for token in tokens],
        }
        if self._options.num_top:
            details["top_tokens"] = [[_token(one) for one in token.top] for token in tokens]
        return details

    def _stream_details(self, end: TextEnd) -> dict[str, Any]:
        return {
            "finish_reason": end.reason,
            "generated_tokens": end.num_tokens,
            "seed": self._seed,
            "input_length": self._num_prompt_tokens,
        }


def _told(piece: Piece) -> TokenText:
    assert piece.told is not None, "the choices of this dialect tell tokens"
    return piece.told


def _end(tokens: Sequence[TokenText]) -> TextEnd:
    end = tokens[-1].end
    assert end is not None, "a choice ends with a token"
    return end


def _mean_logprob(tokens: Sequence[TokenText]) -> float:
    return sum(token.shown.logprob or 0.0 for token in tokens) / len(tokens)


def _token(shown: ShownToken) -> dict[str, Any]:
    return {"id": shown.token_id, "text": shown.text, "logprob": shown.logprob, "special": shown.special}
