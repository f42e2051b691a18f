"""Turns the tokens of one choice into pieces of text that may be shown: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.messages import StepOutput
from everystop.engine.stops import StopMatcher, shown_control_stop

LOWEST_LOGPROB = -9999.0


class TextDecoder(Protocol):
    """One sequence's incremental detokenizer."""

    def feed(self, token_id: int) -> str:
        """The text that became whole with this token."""

    def flush(self) -> str:
        """What was held back; invalid bytes become U+FFFD."""


class Texts(Protocol):
    """What the server needs of a tokenizer beside encoding; see `model.tokenizer.Tokenizer`."""

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""

    def text_decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        """A fresh incremental decoder."""

    def with_control_stops(self, params: SamplingParams) -> SamplingParams:
        """The same, but ending at a control token whose text is a stop string."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids from the start of a text."""

    def spans(self, text: str, *, add_special: bool = True) -> list[tuple[int, int, int]]:
        """The tokens of a text with their places in it."""


class TokenInfo(NamedTuple):
    """Log-probabilities of one token; `text_offset` counts the characters of the choice's text before it.

    The first token of a prompt has none: nothing comes before it.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    text_offset: int


def token_text(token: bytes) -> str:
    """A token as text; bytes that are no whole characters are written out, so that different tokens stay different."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class ShownToken(NamedTuple):
    """A token as a client sees it; `special` ones are control tokens, which are in no generated text. The first token
    of a prompt has no log-probability.
    """

    token_id: int
    text: str
    logprob: float | None
    special: bool


class TextEnd(NamedTuple):
    """How a choice ended: all of its text, why, in the word of its dialect, and how many tokens it has."""

    text: str
    reason: str
    num_tokens: int


class TokenText(NamedTuple):
    """One output token, the best ones at its position, best first, and with the last token of a choice its end."""

    shown: ShownToken
    top: tuple[ShownToken, ...] = ()
    end: TextEnd | None = None


class Piece(NamedTuple):
    """Text that may be shown now, and the log-probabilities of the tokens since the last piece.

    `told` is the token itself where a dialect tells each one; `token_ids` are the ids of the answer's tokens since the
    last piece where the client wants them.
    """

    text: str
    tokens: tuple[TokenInfo, ...] = ()
    told: TokenText | None = None
    token_ids: tuple[int, ...] = ()


class Choice(Protocol):
    """One choice on its way: fed with the engine's outputs in order, it owns its counts and its end."""

    index: int
    num_tokens: int
    num_cached_tokens: int
    finish_reason: str | None

    def take(self, output: StepOutput) -> Iterator[Piece]:
        """What an output brings for the client."""


class Part(NamedTuple):
    """Something new for the client: a piece of choice number `choice`, or its end."""

    choice: int
    piece: Piece | None
    finish_reason: str | None = None


class ChoiceText:
    """The text of one choice, fed with the engine's outputs in order; owns the choice's counts and its end.

    `opening` makes a piece that stands before the answer, `token_bytes` says how a token is named, and `keeps_ids` has
    pieces carry the ids of their tokens.
    """

    def __init__(
        self,
        index: int,
        texts: Texts,
        params: SamplingParams,
        *,
        opening: Callable[[], Piece] | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        keeps_ids: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._params = params
        self._texts = texts
        self._shows_stop = params.include_stop_str_in_output
        self._decoder = texts.text_decoder(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, shows_stop=self._shows_stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._token_bytes = token_bytes or texts.token_bytes
        self._infos: list[TokenInfo] = []
        self._num_chars = 0
        self._opening = opening
        self._ids: list[int] | None = [] if keeps_ids else None

    def take(self, output: StepOutput) -> Iterator[Piece]:
        """Pieces for the tokens of one output, at most one a token; the last one carries what was held back."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if self._opening is not None:
            piece, self._opening = self._opening(), None
            self._num_chars += len(piece.text)
            yield piece
        hides_last = output.finish_reason == "stop" and not isinstance(output.stop_reason, str) and not self._shows_stop
        last = len(output.token_ids) - 1
        for i, token in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs:
                self._note(token, output.logprobs[i])
            if self._ids is not None:
                self._ids.append(token)
            text = "" if hides_last and i == last else self._show(self._decoder.feed(token))
            if text:
                yield self._piece(text)
            if self.finish_reason is not None:
                break
        if output.finish_reason is not None and self.finish_reason is None:
            stop = shown_control_stop(self._params, output.stop_reason, self._texts.token_bytes)
            text = self._show(self._decoder.flush() + stop)
            self.finish_reason = self.finish_reason or output.finish_reason  # `_show` may have met a stop string
            if self._stops is not None:
                text += self._stops.flush()
            if text:
                yield self._piece(text)
        if self.finish_reason is not None and (self._infos or self._ids):
            yield self._piece("")

    def _show(self, text: str) -> str:
        self._num_chars += len(text)
        if self._stops is None or not text:
            return text
        text, stop = self._stops.feed(text, may_stop=self.num_tokens > self._min_tokens)
        if stop is not None:
            self.finish_reason = "stop"
        return text

    def _note(self, token: int, logprobs: TokenLogprobs) -> None:
        top = tuple((self._token_bytes(other), finite(logprob)) for other, logprob in logprobs.top)
        self._infos.append(TokenInfo(self._token_bytes(token), finite(logprobs.logprob), top, self._num_chars))

    def _piece(self, text: str) -> Piece:
        infos, self._infos = tuple(self._infos), []
        if not self._ids:
            return Piece(text, infos)
        ids, self._ids = tuple(self._ids), []
        return Piece(text, infos, None, ids)


class Gathering:
    """Gathers the pieces of each choice, so that each holds the text of `interval` tokens; the first comes at once."""

    def __init__(self, choices: Sequence[Choice], interval: int) -> None:
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
        ids = tuple(token for piece in pieces for token in piece.token_ids)
        return Part(index, Piece("".join(piece.text for piece in pieces), infos, None, ids))


def finite(logprob: float) -> float:
    """JSON knows no infinities: what cannot be written becomes `LOWEST_LOGPROB`."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
