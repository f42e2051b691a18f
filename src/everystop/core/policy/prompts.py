"""The prompts that are being computed, and what they leave to one more: predictions from the step-time model, for
policies that must know before somebody boards.
"""

from __future__ import annotations

from everystop.core.budget import MIN_PREFILL_TOKENS
from everystop.core.policy.base import View
from everystop.core.request import Request
from everystop.core.step_time import StepFeatures, num_pairs

MIN_TO_FILL = 2


def prefill_ns(num_tokens: int, view: View) -> int:
    """Predicted time of one step with a new prompt of so many tokens, and nothing else."""
    return round(view.step_times.execute_ns(StepFeatures(num_tokens, 0, num_pairs(0, num_tokens), 1)))


class Prompts:
    """Requests on board that have had no token since they boarded, each with its rank: the lower, the sooner computed.

    `itl_ns` is what the strictest decoder wants a step to last at most, None if none does. The contexts of decoders
    do not enter the predictions.
    """

    def __init__(self) -> None:
        self._ranked: dict[int, tuple[int, Request]] = {}

    def board(self, request: Request, rank: int) -> None:
        """Its prompt is computed from now on."""
        self._ranked[request.request_id] = (rank, request)

    def discard(self, request: Request) -> None:
        """It has a token, or has lost its place, or has left; or it was not here."""
        self._ranked.pop(request.request_id, None)

    def fill_a_step(self, itl_ns: int | None, view: View) -> bool:
        """There are two or more, with enough left for a whole step: one more would get little done, and be in the way
        of one that is urgent.
        """
        if len(self._ranked) < MIN_TO_FILL:
            return False
        num_left = sum(_num_left(request) for _, request in self._ranked.values())
        return num_left >= self._tokens_a_step(itl_ns, view)

    def has_behind(self, rank: int) -> bool:
        """One of them is computed after a request of that rank."""
        return any(other > rank for other, _ in self._ranked.values())

    def first_token_in_ns(self, num_own: int, rank: int, itl_ns: int | None, view: View) -> int:
        """Predicted time to the first token of a request that boards now with `num_own` tokens to compute: that of the
        prompts here that go before it, of its own, and, where others wait too, of as many tokens again, since it gets
        half of each step then.
        """
        num_tokens = num_own * (2 if view.num_waiting > 1 else 1)
        num_tokens += sum(_num_left(other) for other_rank, other in self._ranked.values() if other_rank < rank)
        num_steps = -(-num_tokens // self._tokens_a_step(itl_ns, view))
        num_decodes = num_steps * self._num_decoders(view)
        work = StepFeatures(num_tokens + num_decodes, 0, num_pairs(0, num_own), num_steps + num_decodes)
        return round(view.step_times.execute_ns(work) + (num_steps - 1) * view.step_times.step_ns)

    def _num_decoders(self, view: View) -> int:
        return view.num_running - len(self._ranked)

    def _tokens_a_step(self, itl_ns: int | None, view: View) -> int:
        """Tokens that a step has for prompts, by its limits and, where there are decoders, by its time; at least 1."""
        num_decoders = self._num_decoders(view)
        num_tokens = view.max_num_batched_tokens - num_decoders
        if view.max_num_prefill_tokens is not None:
            num_tokens = min(num_tokens, view.max_num_prefill_tokens)
        targets = [target for target in (view.target_itl_ns, itl_ns) if target is not None]
        if targets and num_decoders:
            left_ns = min(targets) - view.step_times.execute_ns(StepFeatures(num_decoders, 0, 0, num_decoders))
            num_tokens = min(num_tokens, max(MIN_PREFILL_TOKENS, view.step_times.largest_chunk(0, left_ns)))
        return max(1, num_tokens)


def _num_left(request: Request) -> int:
    return request.num_tokens - request.num_scheduled_through
