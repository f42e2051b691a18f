"""The output of one choice as TGI tells it: token by token, each with its id; control tokens and stop strings too."""

from __future__ import annotations

from collections.abc import Iterator

from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.messages import StepOutput
from everystop.server.texts import Piece, ShownToken, TextEnd, Texts, TokenText, finite


class TgiText:
    """As `ChoiceText`, one piece a token. Nothing is held back, since a stop string is part of the text.

    Text behind the stop string that ends a choice is dropped, from its last token too.
    """

    def __init__(self, index: int, texts: Texts, params: SamplingParams) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._decoder = texts.text_decoder()
        self._token_bytes = texts.token_bytes
        self._control_ids = texts.control_ids
        self._stop_ids = frozenset(params.stop_token_ids)  # of control tokens that are stop strings
        self._shown: list[str] = []

    def take(self, output: StepOutput) -> Iterator[Piece]:
        """One piece for each token of one output; the last one carries the end."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        ids, reason = output.token_ids, self._reason(output)
        for i, token in enumerate(ids):
            self.num_tokens += 1
            is_last = reason is not None and i == len(ids) - 1
            ends_text = is_last and output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
            text = "" if ends_text else self._decoder.feed(token)
            if is_last:
                text = self._last_text(text, output)
            self._shown.append(text)
            special = ends_text or token in self._control_ids
            shown = text or (self._written(token) if special else "")
            logprobs = output.logprobs[i] if output.logprobs else None
            logprob = 0.0 if logprobs is None else finite(logprobs.logprob)
            end = TextEnd("".join(self._shown), reason, self.num_tokens) if is_last and reason is not None else None
            token_text = TokenText(ShownToken(token, shown, logprob, special), self._top(logprobs), end)
            yield Piece(text, told=token_text)
        self.finish_reason = reason

    def _last_text(self, text: str, output: StepOutput) -> str:
        """The text of the last token, with what the decoder held back, and without what stands behind a stop string."""
        text += self._decoder.flush()
        stop = output.stop_reason
        if not isinstance(stop, str):
            return text
        before = "".join(self._shown)[-len(stop) :]  # the stop string ends in the last token, and is the first there
        start = (before + text).find(stop)
        return text if start < 0 else text[: start + len(stop) - len(before)]

    def _reason(self, output: StepOutput) -> str | None:
        """TGI's word for why a choice has ended; None while it goes on."""
        if output.finish_reason != "stop":
            return output.finish_reason
        stop = output.stop_reason
        return "stop_sequence" if isinstance(stop, str) or stop in self._stop_ids else "eos_token"

    def _top(self, logprobs: TokenLogprobs | None) -> tuple[ShownToken, ...]:
        if logprobs is None or not logprobs.top:
            return ()
        return tuple(
            ShownToken(token, self._written(token), finite(logprob), token in self._control_ids)
            for token, logprob in logprobs.top
        )

    def _written(self, token: int) -> str:
        return self._token_bytes(token).decode(errors="replace")
