"""What one step may compute: how much is left for prompts, in tokens or in time, and how large a share of it one
request may take.
"""

from __future__ import annotations

from everystop.core.step_time import StepFeatures, StepTimeModel, num_pairs

MIN_PREFILL_TOKENS = 16
MIN_BESIDE_DECODERS = 64
MARGIN_DEVIATIONS = 2


def prefill_beside(num_decoders: int, num_others: int, per_decode: int | None) -> int | None:
    """Most prompt tokens of a step in which so many decode, while so many others could be computed that have no token
    yet, or have lost what they had computed; None where there is no such limit.

    A step lasts as long for all, so a chunk is a gap for each decoder, and a token sooner for each of the others. Where
    the decoders are as many or more, the chunk may be as long as makes the step last some times what they take alone:
    so many tokens for each of them, and 64 at least. Example, 5 for each: beside 16 decoders 80, beside 3 decoders 64,
    and no limit beside 16 while 17 others have no token.
    """
    if not per_decode or not num_decoders or num_decoders < num_others:
        return None
    return max(MIN_BESIDE_DECODERS, per_decode * num_decoders)


class TimeBudget:
    """Time that prompts may still take in the step being planned, so that it lasts `target_ns` at most.

    As predictions are off by a share of `deviation` in the mean, it aims below the target, by twice that share, so that
    few steps exceed it. Prompts get at least 16 tokens a step in all, lest they starve beside decoders that take up the
    whole target alone.
    """

    def __init__(self, model: StepTimeModel, target_ns: int, decodes: StepFeatures, deviation: float = 0.0) -> None:
        self.target_ns = target_ns
        self._aim_ns = target_ns / (1 + MARGIN_DEVIATIONS * deviation)
        self.predicted_ns = model.execute_ns(decodes)
        self._model = model
        self._num_tokens = 0

    def largest_chunk(self, start: int) -> int:
        """Most prefill tokens from position `start` on that a request may still have."""
        in_time = self._model.largest_chunk(start, self._aim_ns - self.predicted_ns)
        return max(in_time, MIN_PREFILL_TOKENS - self._num_tokens)

    def spend(self, start: int, num_tokens: int) -> None:
        """A row of that many tokens from position `start` on is in the plan."""
        row = (num_tokens, start + 1, 0) if num_tokens == 1 else (num_tokens, 0, num_pairs(start, num_tokens))
        self.predicted_ns += self._model.execute_ns(StepFeatures(*row, 1)) - self._model.step_ns
        self._num_tokens += num_tokens


class StepBudget:
    """Tokens that prefill chunks may still use in the step being planned.

    `tokens` bounds all rows that are not running decoders, `prefill_tokens` those of requests with more than one token
    to compute, and `time`, where a target is set, those too; a fork, which has one, counts against the first only.
    `scored_tokens` bounds, where a target is set, those of prompts that are scored, but for one token each.
    """

    def __init__(
        self,
        tokens: int,
        max_num_prefill_tokens: int | None,
        block_size: int,
        time: TimeBudget | None = None,
        max_num_scored_tokens: int | None = None,
    ) -> None:
        self.tokens = tokens
        self.scored_tokens = tokens if time is None or max_num_scored_tokens is None else max_num_scored_tokens
        self.prefill_tokens = tokens if max_num_prefill_tokens is None else min(tokens, max_num_prefill_tokens)
        self.time = time
        self._block_size = block_size
        self._num_spent = 0
        self._may_fragment: bool | None = None

    def left_at(self, start: int) -> int:
        """Prefill tokens that are left for a request at position `start`."""
        if self.time is None:
            return self.prefill_tokens
        return max(0, min(self.prefill_tokens, self.time.largest_chunk(start)))

    def share(self, start: int, remaining: int, *, contended: bool, is_scored: bool = False) -> int:
        """Tokens for a request with `remaining` to compute from position `start` on; 0 if it should wait.

        While others want some it takes at most half of what is left, ending on a block border, so that others can
        match the block. Example, block_size 32, 200 left, 500 remaining: alone 200; contended, from position 0, half
        is 100, cut to 96. The next one finds 104 left and gets 32, and a fragment under a block goes to nobody yet,
        unless the first to be asked for finds less than two blocks: then a half is a half, whatever it ends on. The
        last takes what is left, but no more than half of the whole step: the rest is for those before it.
        """
        if is_scored:
            remaining = min(remaining, max(1, self.scored_tokens))
        if remaining == 1:
            return min(1, self.tokens)
        left = self.left_at(start)
        if self._may_fragment is None:
            self._may_fragment = left < 2 * self._block_size
        if not contended:
            return min(remaining, left, self._half_of_all(left) if self._num_spent else left)
        half, block_size = (left + 1) // 2, self._block_size
        if remaining <= half:
            return remaining
        to_border = (start + half) // block_size * block_size - start
        if to_border > 0:
            return to_border
        if self._may_fragment:
            return half
        return min(remaining, block_size - start % block_size) if left >= block_size else 0

    def _half_of_all(self, left: int) -> int:
        """Half of what the step had for prompts, those dealt so far included."""
        return (left + self._num_spent + 1) // 2

    def spend(self, start: int, num_tokens: int, *, is_prefill: bool, is_scored: bool = False) -> None:
        """A row of that many tokens from position `start` on is in the plan; `is_prefill` if its request had more than
        one to compute, `is_scored` if its prompt is scored.
        """
        self.tokens -= num_tokens
        self.scored_tokens -= num_tokens if is_scored else 0
        self._num_spent += num_tokens if is_prefill else 0
        if is_prefill:
            self.prefill_tokens -= num_tokens
        self.prefill_tokens = min(self.prefill_tokens, self.tokens)
        if self.time is not None:
            self.time.spend(start, num_tokens)
