"""How long a step takes, as a line over what its plan computes; the coefficients come from a fit, a file or a guess.

    t = step + token · tokens + decode_context · Σ context of decode rows + prefill_pair · Σ pairs of prefill rows
        + row · rows

A decode row is one of one token; its context is the tokens that it attends to. A prefill row of n tokens from position
s on has n·s + n·(n + 1)/2 pairs of a token and one that it attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from everystop.core.plan import StepPlan

MAX_TOKENS = 1 << 30


def num_pairs(start: int, num_tokens: int) -> int:
    """Pairs of a token and one that it attends to, in a row of `num_tokens` from position `start` on."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepFeatures(NamedTuple):
    """What a step computes, as far as its time depends on it."""

    num_tokens: int
    decode_context: int
    prefill_pairs: int
    num_rows: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepFeatures:
        """The features of a plan; padded rows are computed, so they count."""
        starts, nums_tokens = plan.rows.starts, plan.rows.nums_tokens
        num_rows, num_tokens = len(starts), sum(nums_tokens)
        if num_tokens == num_rows:  # none has more than one
            return cls(num_tokens, sum(starts) + num_rows, 0, num_rows)
        decode_context = prefill_pairs = 0
        for start, n in zip(starts, nums_tokens, strict=True):
            if n == 1:
                decode_context += start + 1
            else:
                prefill_pairs += num_pairs(start, n)
        return cls(num_tokens, decode_context, prefill_pairs, num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Nanoseconds per unit; see the module."""

    step_ns: float = 0.0
    token_ns: float = 0.0
    decode_context_ns: float = 0.0
    prefill_pair_ns: float = 0.0
    row_ns: float = 0.0

    def execute_ns(self, features: StepFeatures) -> float:
        """Time of a step of these features."""
        num_tokens, decode_context, prefill_pairs, num_rows = features
        return (
            self.step_ns
            + self.token_ns * num_tokens
            + self.decode_context_ns * decode_context
            + self.prefill_pair_ns * prefill_pairs
            + self.row_ns * num_rows
        )

    def largest_chunk(self, start: int, time_ns: float) -> int:
        """Most prefill tokens from position `start` on whose row takes at most `time_ns`; may be negative."""
        quadratic = self.prefill_pair_ns / 2
        linear = self.token_ns + self.prefill_pair_ns * (start + 0.5)
        left_ns = time_ns - self.row_ns
        if left_ns <= 0 or linear <= 0:
            return 0 if left_ns <= 0 else MAX_TOKENS
        # The positive root of quadratic · n² + linear · n = left, in the form that also holds for quadratic = 0.
        return min(MAX_TOKENS, int(2 * left_ns / (linear + sqrt(linear * linear + 4 * quadratic * left_ns))))


UNKNOWN_STEP_TIMES = StepTimeModel()
