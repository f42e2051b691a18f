"""Turns the tokens of one choice into pieces of text that may be shown: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.messages import StepOutput
from everystop.engine.stops import StopMatcher

LOWEST_LOGPROB = -9999.0


class TextDecoder(Protocol):
    """One sequence's incremental detokenizer."""

    def feed(self, token_id: int) -> str:
        """The text that became whole with this token."""

    def flush(self) -> str:
        """What was held back; invalid bytes become U+FFFD."""


class Texts(Protocol):
    """What text needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        """A fresh incremental decoder."""

    def with_control_stops(self, params: SamplingParams) -> SamplingParams:
        """The same, but ending at a control token whose text is a stop string."""


class TokenInfo(NamedTuple):
    """Log-probabilities of one output token; `text_offset` counts the characters of output text before it."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    text_offset: int


class Piece(NamedTuple):
    """Text that may be shown now, and the log-probabilities of the tokens since the last piece."""

    text: str
    tokens: tuple[TokenInfo, ...] = ()


class Part(NamedTuple):
    """Something new for the client: a piece of choice number `choice`, or its end."""

    choice: int
    piece: Piece | None
    finish_reason: str | None = None


class ChoiceText:
    """The text of one choice, fed with the engine's outputs in order; owns the choice's counts and its end."""

    def __init__(self, index: int, texts: Texts, params: SamplingParams) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._shows_stop = params.include_stop_str_in_output
        self._decoder = texts.text_decoder(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, shows_stop=self._shows_stop) if params.stop else None
        self._token_bytes = texts.token_bytes
        self._infos: list[TokenInfo] = []
        self._num_chars = 0

    def take(self, output: StepOutput) -> Iterator[Piece]:
        """Pieces for the tokens of one output, at most one a token; the last one carries what was held back."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        hides_last = output.finish_reason == "stop" and not isinstance(output.stop_reason, str) and not self._shows_stop
        last = len(output.token_ids) - 1
        for i, token in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs:
                self._note(token, output.logprobs[i])
            text = "" if hides_last and i == last else self._show(self._decoder.feed(token))
            if text:
                yield self._piece(text)
            if self.finish_reason is not None:
                break
        if output.finish_reason is not None and self.finish_reason is None:
            text = self._show(self._decoder.flush())
            self.finish_reason = self.finish_reason or output.finish_reason
            if self._stops is not None:
                text += self._stops.flush()
            if text:
                yield self._piece(text)
        if self.finish_reason is not None and self._infos:
            yield self._piece("")

    def _show(self, text: str) -> str:
        self._num_chars += len(text)
        if self._stops is None or not text:
            return text
        text, stop = self._stops.feed(text)
        if stop is not None:
            self.finish_reason = "stop"
        return text

    def _note(self, token: int, logprobs: TokenLogprobs) -> None:
        top = tuple((self._token_bytes(other), _finite(logprob)) for other, logprob in logprobs.top)
        self._infos.append(TokenInfo(self._token_bytes(token), _finite(logprobs.logprob), top, self._num_chars))

    def _piece(self, text: str) -> Piece:
        infos, self._infos = tuple(self._infos), []
        return Piece(text, infos)


class Gathering:
    """Gathers the pieces of each choice, so that each holds the text of `interval` tokens; the first comes at once."""

    def __init__(self, choices: Sequence[ChoiceText], interval: int) -> None:
        self._choices = choices
        self._interval = interval
        self._held: dict[int, list[Piece]] = {choice.index: [] for choice in choices}
        self._due: dict[int, int] = {choice.index: 1 for choice in choices}  # by tokens of the choice

    def of(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The parts that are due; an end brings what is held before it."""
        for index, piece, finish_reason in parts:
            held, num_tokens = self._held[index], self._choices[index].num_tokens
            if piece is not None:
                held.append(piece)
            if held and (finish_reason is not None or num_tokens >= self._due[index]):
                yield self._take(index)
                self._due[index] = num_tokens + self._interval
            if finish_reason is not None:
                yield Part(index, None, finish_reason)

    def rest(self) -> Iterator[Part]:
        """What is held of an answer that goes no further."""
        return (self._take(index) for index, held in self._held.items() if held)

    def _take(self, index: int) -> Part:
        pieces, self._held[index] = self._held[index], []
        infos = tuple(info for piece in pieces for info in piece.tokens)
        return Part(index, Piece("".join(piece.text for piece in pieces), infos))


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
