"""What an answer says of its prompts: their text, token ids and log-probabilities; and of its own token ids.

One report a client request, made only where the client asks for any of it. Asyncio thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from everystop.core.plan import TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.engine.messages import StepOutput
from everystop.server.answer_size import num_of_prompts
from everystop.server.texts import ChoiceText, Piece, ShownToken, Texts, TokenInfo, finite, token_text
from everystop.server.wishes import Wishes

LARGE_ENTRIES = 5_000


class PromptText:
    """One prompt as its answers show it, shared by its n choices; its log-probabilities come piece by piece."""

    def __init__(self, token_ids: tuple[int, ...], num_scores: int) -> None:
        self.token_ids = token_ids
        self.scores: list[TokenLogprobs] = []
        self.held: list[StepOutput] = []
        self.echo: Piece | None = None
        self._num_scores = num_scores

    @property
    def is_complete(self) -> bool:
        """All of its log-probabilities are there, or none are wanted."""
        return len(self.scores) >= self._num_scores


class PromptReport:
    """Gathers what the engine says of the prompts, and words it as vLLM does.

    The first choice of a prompt brings the log-probabilities for all; outputs of choices that are ahead of it are held
    until it has. Entry i of a prompt's log-probabilities is that of token i, and the first is null. An answer that
    `is_large` takes long to write.
    """

    def __init__(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, wishes: Wishes, texts: Texts
    ) -> None:
        self._wishes = wishes
        self._params = params
        self._texts = texts
        self._token_bytes = _name_by_id if wishes.names_by_id else texts.token_bytes
        scores = params.prompt_logprobs is not None
        self._prompts = [PromptText(prompt, len(prompt) - 1 if scores else 0) for prompt in prompts]
        self.is_large = num_of_prompts(prompts, params) > LARGE_ENTRIES

    def make_choice(self, index: int, texts: Texts, params: SamplingParams) -> ChoiceText:
        """A choice whose text begins with the prompt where that is wanted, and tells the ids of its tokens so."""
        opening = (lambda: self._echo(self._of(index))) if self._wishes.echo else None
        return ChoiceText(
            index,
            texts,
            params,
            opening=opening,
            token_bytes=self._token_bytes,
            keeps_ids=self._wishes.token_ids,
        )

    def ready(self, outputs: Sequence[StepOutput], first_id: int) -> list[StepOutput]:
        """The outputs that can be shown now, in order; `first_id` is the request id of the first choice."""
        ready: list[StepOutput] = []
        for output in outputs:
            prompt = self._of(output.request_id - first_id)
            prompt.scores += output.prompt_logprobs
            if prompt.is_complete:
                ready += prompt.held
                prompt.held.clear()
                ready.append(output)
            elif output.refused or output.error is not None or output.finish_reason == "abort":
                ready.append(output)
            elif output.token_ids or output.finish_reason is not None:
                prompt.held.append(output)
        return ready

    def opening(self, index: int) -> dict[str, Any]:
        """What a stream says of choice `index`'s prompt before the first piece."""
        return {"prompt_token_ids": self._of(index).token_ids} if self._wishes.token_ids else {}

    def of_prompt(self, index: int) -> dict[str, Any]:
        """What a whole answer says of the prompt of choice `index`."""
        fields: dict[str, Any] = {}
        if self._wishes.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._logprobs(self._of(index), self._wishes.prompt_logprobs)
        return fields | self.opening(index)

    def tokens_of(self, index: int) -> list[ShownToken]:
        """The tokens of the prompt of choice `index`, with their log-probabilities where those were asked for."""
        prompt, texts = self._of(index), self._texts
        logprobs = [None, *(finite(score.logprob) for score in prompt.scores)]
        return [
            ShownToken(token, texts.token_bytes(token).decode(errors="replace"), logprob, token in texts.control_ids)
            for token, logprob in zip_longest(prompt.token_ids, logprobs)
        ]

    def of_pieces(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What is said of the tokens of these pieces."""
        return {"token_ids": [token for piece in pieces for token in piece.token_ids]} if self._wishes.token_ids else {}

    def _of(self, index: int) -> PromptText:
        return self._prompts[index // self._params.n]

    def _logprobs(self, prompt: PromptText, num_top: int) -> list[dict[str, Any] | None]:
        """By token id, the prompt's own token first, then the best ones; ranks count from 1."""
        entries: list[dict[str, Any] | None] = [None]
        for token_id, score in zip(prompt.token_ids[1:], prompt.scores, strict=True):
            ranked = [(token_id, score.logprob, score.rank)]
            ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(score.top[:num_top], 1)]
            entry: dict[str, Any] = {}
            for i, logprob, rank in ranked:
                text = token_text(self._texts.token_bytes(i))
                entry.setdefault(str(i), {"logprob": finite(logprob), "rank": rank, "decoded_token": text})
            entries.append(entry)
        return entries

    def _echo(self, prompt: PromptText) -> Piece:
        """The prompt as the first piece of an answer."""
        if prompt.echo is None:
            shown = self._shown(prompt.token_ids)
            infos = self._infos(prompt, shown) if self._params.logprobs is not None else ()
            prompt.echo = Piece("".join(shown), infos)
        return prompt.echo

    def _shown(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token of a prompt completes; the last one also what is left, as U+FFFD."""
        skips = self._params.skip_special_tokens
        decoder = self._texts.text_decoder(skip_special_tokens=skips)
        shown = [decoder.feed(token_id) for token_id in token_ids]
        shown[-1] += decoder.flush()
        text, at_start = "".join(shown), self._texts.decode(token_ids, skip_special_tokens=skips)
        if text == " " + at_start:  # the blank that some tokenizers put before a text
            first = next(i for i, piece in enumerate(shown) if piece)
            shown[first] = shown[first][1:]
        return shown

    def _infos(self, prompt: PromptText, shown: Sequence[str]) -> tuple[TokenInfo, ...]:
        infos, offset = [], 0
        num_top = self._params.logprobs or 0
        for i, (token_id, text) in enumerate(zip(prompt.token_ids, shown, strict=True)):
            token = self._token_bytes(token_id)
            if i == 0:
                infos.append(TokenInfo(token, None, (), offset))
            else:
                score = prompt.scores[i - 1]
                top = tuple((self._token_bytes(other), finite(logprob)) for other, logprob in score.top[:num_top])
                infos.append(TokenInfo(token, finite(score.logprob), top, offset))
            offset += len(text)
        return tuple(infos)


def report_of(
    prompts: Sequence[tuple[int, ...]], params: SamplingParams, wishes: Wishes, texts: Texts
) -> PromptReport | None:
    """The report that these wishes call for; None where an answer says nothing of prompts or token ids."""
    wants = wishes.echo or wishes.prompt_logprobs is not None or wishes.token_ids or wishes.names_by_id
    return PromptReport(prompts, params, wishes, texts) if wants else None


def _name_by_id(token_id: int) -> bytes:
    return b"token_id:%d" % token_id
