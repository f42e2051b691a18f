"""How fast those who wait get places, and so when one of them should have got one."""

from __future__ import annotations

import math

from everystop.core.durations import NS_PER_S

MAX_RETRY_AFTER_S = 60  # OpenAI's clients take no advice beyond it, and come back at once
RATE_WINDOW_NS = 10 * NS_PER_S


class ServiceRate:
    """Prompt tokens, or requests, that got places by time, over the last 10 to 20 s in which anybody waited."""

    def __init__(self) -> None:
        self._num_tokens = self._num_tokens_before = 0
        self._busy_ns = self._busy_before_ns = 0

    @property
    def tokens_per_s(self) -> float:
        """0 as long as nobody has got a place after waiting."""
        busy_ns = self._busy_ns + self._busy_before_ns
        return (self._num_tokens + self._num_tokens_before) * NS_PER_S / busy_ns if busy_ns else 0.0

    def wait(self, ns: int) -> None:
        """Somebody has been waiting for so long."""
        self._busy_ns += ns
        if self._busy_ns >= RATE_WINDOW_NS:
            self._num_tokens_before, self._busy_before_ns = self._num_tokens, self._busy_ns
            self._num_tokens = self._busy_ns = 0

    def board(self, num_tokens: int) -> None:
        """Somebody with a prompt of that length has got a place."""
        self._num_tokens += num_tokens

    def seconds_for(self, num_tokens: int) -> int:
        """When so many tokens ahead should have got places: whole seconds from 1 to `MAX_RETRY_AFTER_S`. While nobody
        has got one, as long again as has been waited.
        """
        rate = self.tokens_per_s
        seconds = num_tokens / rate if rate else (self._busy_ns + self._busy_before_ns) / NS_PER_S
        return min(max(1, math.ceil(seconds)), MAX_RETRY_AFTER_S)
