"""Whether an empty system could serve a request: what can never be is refused at once, and nobody waits for it.

Every way in asks here: the HTTP API, `LLM`, the scheduler itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everystop.core.errors import NeverFits, PromptTooLong, RequestError
from everystop.core.request import SamplingParams


def check_fits(num_prompt_tokens: int, max_tokens: int | None, limit_tokens: int, *, min_tokens: int = 0) -> int:
    """How many tokens the answer may have: `max_tokens`, or where that is None all that fit beside the prompt, of which
    there must be at least `min_tokens`.

    `limit_tokens` is the longest sequence that an empty system holds. Raises PromptTooLong, NeverFits, and RequestError
    for a prompt without tokens.
    """
    if num_prompt_tokens == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt", code="empty_prompt")
    if num_prompt_tokens >= limit_tokens:
        raise PromptTooLong(num_prompt_tokens, limit_tokens)
    if max_tokens is None:
        if num_prompt_tokens + min_tokens > limit_tokens:
            raise NeverFits(num_prompt_tokens, min_tokens, limit_tokens, name="min_tokens")
        return limit_tokens - num_prompt_tokens
    if num_prompt_tokens + max_tokens > limit_tokens:
        raise NeverFits(num_prompt_tokens, max_tokens, limit_tokens)
    return max_tokens


def check_ids(name: str, ids: Sequence[int], num_valid_tokens: int) -> None:
    """Raise RequestError for an id that no token has; `name` is the field's."""
    if len(ids) and not (min(ids) >= 0 and max(ids) < num_valid_tokens):
        bad = next(token for token in ids if not 0 <= token < num_valid_tokens)
        raise RequestError(
            f"{name} holds the token id {bad}, and the vocabulary has {num_valid_tokens:,}; ids must be from 0 to "
            f"{num_valid_tokens - 1}",
            param=name,
            code="invalid_token_id",
        )


def ids_of(params: SamplingParams) -> Iterator[tuple[str, Sequence[int]]]:
    """Every list of token ids that the settings hold, with the name of its field."""
    yield "logit_bias", [token for token, _ in params.logit_bias]
    yield "stop_token_ids", params.stop_token_ids
    if params.allowed_token_ids is not None:
        yield "allowed_token_ids", params.allowed_token_ids
    for ids in params.bad_word_ids:
        yield "bad_word_ids", ids


def check_settings(params: SamplingParams, num_valid_tokens: int) -> None:
    """Raise RequestError for values that are right alone, and cannot be honoured together or with this vocabulary."""
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, which is more than max_tokens {params.max_tokens}; lower the one, or "
            "raise the other",
            param="min_tokens",
            code="conflicting_fields",
        )
    for name, ids in ids_of(params):
        check_ids(name, ids, num_valid_tokens)
    if params.allowed_token_ids is not None and len(params.allowed_token_ids) == 0:
        raise RequestError(
            "allowed_token_ids is empty: no token could be chosen; name at least one, or leave it out",
            param="allowed_token_ids",
            code="no_token_allowed",
        )
