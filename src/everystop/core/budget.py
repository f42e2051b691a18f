"""The tokens of one step: how many are left for prompts, and how large a share of them one request may take."""

from __future__ import annotations


class StepBudget:
    """Tokens that prefill chunks may still use in the step being planned.

    `tokens` bounds all rows that are not running decoders, `prefill_tokens` those of requests with more than one token
    to compute; a fork, which has one, counts against the first only.
    """

    def __init__(self, tokens: int, max_num_prefill_tokens: int | None, block_size: int) -> None:
        self.tokens = tokens
        self.prefill_tokens = tokens if max_num_prefill_tokens is None else min(tokens, max_num_prefill_tokens)
        self._block_size = block_size
        self._may_fragment = self.prefill_tokens < 2 * block_size

    def share(self, start: int, remaining: int, *, contended: bool) -> int:
        """Tokens for a request with `remaining` to compute from position `start` on; 0 if it should wait.

        While others want some it takes at most half of what is left, ending on a block border, so that others can
        match the block. Example, block_size 32, 200 left, 500 remaining: alone 200; contended, from position 0, half
        is 100, cut to 96. The next one finds 104 left and gets 32, and a fragment under a block goes to nobody yet,
        unless the whole budget is that small.
        """
        if remaining == 1:
            return min(1, self.tokens)
        left = self.prefill_tokens
        if not contended:
            return min(remaining, left)
        half, block_size = (left + 1) // 2, self._block_size
        if remaining <= half:
            return remaining
        to_border = (start + half) // block_size * block_size - start
        if to_border > 0:
            return to_border
        if left >= block_size:
            return min(remaining, block_size - start % block_size)
        return half if self._may_fragment else 0

    def spend(self, num_tokens: int, *, is_prefill: bool) -> None:
        """A row of that many tokens is in the plan; `is_prefill` if its request had more than one to compute."""
        self.tokens -= num_tokens
        if is_prefill:
            self.prefill_tokens -= num_tokens
        self.prefill_tokens = min(self.prefill_tokens, self.tokens)
