"""First come, first served, but when blocks run short they are taken from whoever has least to compute again."""

from __future__ import annotations

from everystop.core.policy.base import View
from everystop.core.policy.continuous import Continuous
from everystop.core.request import Request


class Thrifty(Continuous):
    """The victim is the running request with the fewest tokens that only its own blocks hold, to within a factor of
    two: of those that would lose 64 to 127 tokens, say, the youngest, since the others are nearer to their ends.

    What a victim loses is what a preemption costs: a block of its own costs a block of tokens, one that a running
    request shares costs nothing. The less it loses, the less is taken beyond what is short.

    That could let the same request pay every time, but after `max_preemptions` it boards first and keeps first.
    """

    def keep_key(self, request: Request, view: View) -> tuple[int, ...]:
        return (-view.num_private_tokens(request).bit_length(), request.request_id)
