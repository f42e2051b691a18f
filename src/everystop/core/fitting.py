"""Whether an empty system could serve a request: what can never be is refused at once, and nobody waits for it."""

from __future__ import annotations

from everystop.core.errors import NeverFits, PromptTooLong, RequestError


def check_fits(num_prompt_tokens: int, max_tokens: int | None, limit_tokens: int) -> int:
    """How many tokens the answer may have: `max_tokens`, or where that is None all that fit beside the prompt.

    `limit_tokens` is the longest sequence that an empty system holds. Raises PromptTooLong, NeverFits, and RequestError
    for a prompt without tokens.
    """
    if num_prompt_tokens == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt", code="empty_prompt")
    if num_prompt_tokens >= limit_tokens:
        raise PromptTooLong(num_prompt_tokens, limit_tokens)
    if max_tokens is None:
        return limit_tokens - num_prompt_tokens
    if num_prompt_tokens + max_tokens > limit_tokens:
        raise NeverFits(num_prompt_tokens, max_tokens, limit_tokens)
    return max_tokens
