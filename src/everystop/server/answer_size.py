"""How much one answer holds in memory at once: its log-probabilities and token ids are counted before it is begun."""

from __future__ import annotations

from collections.abc import Sequence

from everystop.core.errors import RequestError
from everystop.core.request import SamplingParams
from everystop.server.protocol import Parsed
from everystop.server.wishes import Wishes

MAX_ENTRIES = 200_000


def check_size(
    parsed: Parsed, params: SamplingParams, prompts: Sequence[tuple[int, ...]], granted: Sequence[int]
) -> None:
    """Raise RequestError for more log-probabilities and token ids than may be held for one answer.

    `granted[i]` is how many tokens each choice of prompt i may have.
    """
    of_prompts = num_of_prompts(prompts, params, is_chat=bool(parsed.messages))
    if of_prompts > MAX_ENTRIES:
        raise RequestError(
            f"the prompts' log-probabilities would be {of_prompts:,} numbers, and at most {MAX_ENTRIES:,} are given in "
            "one answer; send fewer or shorter prompts, or ask for fewer choices or alternatives",
            param="logprobs" if parsed.wishes.prompt_logprobs is None else "prompt_logprobs",
            code="too_many_logprobs",
        )
    of_output = num_of_output(params, parsed.wishes, granted, stream=parsed.stream)
    if of_prompts + of_output > MAX_ENTRIES:
        raise _too_many(parsed, params, granted, of_prompts, of_output)


def num_of_prompts(prompts: Sequence[tuple[int, ...]], params: SamplingParams, *, is_chat: bool = False) -> int:
    """How many log-probabilities of prompts an answer holds; each choice repeats them, but for those of a chat."""
    if params.prompt_logprobs is None:
        return 0
    return sum(map(len, prompts)) * (params.prompt_logprobs + 1) * (1 if is_chat else params.n)


def num_of_output(params: SamplingParams, wishes: Wishes, granted: Sequence[int], *, stream: bool) -> int:
    """How many entries of generated tokens are held at once: in a stream those of one chunk of each choice, and none
    where each token goes out as it comes.
    """
    if stream:
        granted = [min(num, wishes.interval) for num in granted] if wishes.interval > 1 else []
    return sum(granted) * params.n * _entries_per_token(params, wishes)


def _entries_per_token(params: SamplingParams, wishes: Wishes) -> int:
    return int(wishes.token_ids) if params.logprobs is None else params.logprobs + 1


def _too_many(
    parsed: Parsed, params: SamplingParams, granted: Sequence[int], of_prompts: int, of_output: int
) -> RequestError:
    """What is asked for in numbers, and which of them to lower."""
    each, most, wishes = _entries_per_token(params, parsed.wishes), max(granted), parsed.wishes
    ways = ["fewer prompts or choices", "a smaller max_tokens"]
    if params.logprobs:
        ways.append("fewer alternatives")
    pieces = "one piece"
    if parsed.stream:
        most = min(most, wishes.interval)
        pieces = f"chunks of stream_interval = {wishes.interval:,}"
        ways.append("a smaller stream_interval")
    elif wishes.prompt_logprobs is None and not ("n" in parsed.names and params.n > 1):  # TGI's best_of cannot be
        ways.append("a stream")
    left_out = " (max_tokens is left out, which means all that fit)" if params.max_tokens is None else ""
    what = "token ids" if params.logprobs is None else "log-probabilities"
    beside = f", beside {of_prompts:,} of the prompts" if of_prompts else ""
    return RequestError(
        f"an answer in {pieces} could hold {of_output:,} {what}{beside}: prompts: {len(granted):,}, each with n = "
        f"{params.n} of up to {most:,} tokens{left_out}, of {each} a token; at most {MAX_ENTRIES:,} are held for one "
        f"answer. Ask for {', '.join(ways[:-1])} or {ways[-1]}",
        param=_field_of(parsed, params),
        code="too_many_logprobs",
    )


def _field_of(parsed: Parsed, params: SamplingParams) -> str:
    if params.logprobs is None:
        return "return_token_ids"
    if params.logprobs > 0:
        return "top_logprobs" if parsed.messages else "logprobs"
    return "n" if params.n > 1 else "max_tokens"
