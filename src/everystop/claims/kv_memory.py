"""Reads from a run how much memory of the KV cache was reserved and how much of it was used, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from everystop.claims.steps import history_of
from everystop.core.events import FinishEvent, PreemptEvent
from everystop.observe.comparison import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Sums over the steps of a run, counted after each, when who has finished has left: requests on board, tokens that
    stand in the cache, tokens that the blocks in use have room for, and tokens of their whole prompts and answers.
    """

    num_requests: int
    num_used: int
    num_reserved: int
    num_prompt: int
    num_whole: int

    @property
    def wasted_share(self) -> float:
        """Of what paged blocks reserve, what no token stands in."""
        return 1 - self.num_used / self.num_reserved

    def wasted_of(self, num_reserved: int) -> float:
        """The same where so much would have been reserved for the same requests."""
        return 1 - self.num_used / num_reserved


def memory_use(run: Run, block_size: int) -> MemoryUse:
    """Of a run without common prefixes, at whose end nobody is on board.

    Example, block size 16, one request of 20 tokens that brings 3: after its prefill 20 tokens stand in 2 blocks, then
    21; after the third token it has left. That is 41 tokens used of 64 reserved.
    """
    history = history_of(run)
    leaving: dict[int, list[int]] = {}
    for act in history.acts.since(history.acts.start):
        if isinstance(act, FinishEvent | PreemptEvent):
            leaving.setdefault(act.step_id, []).append(act.request_id)
    steps = history.steps.since(history.steps.start)
    num_blocks = steps[-1].num_free_blocks
    stored: dict[int, int] = {}
    sums = [0] * 5
    for record in steps:
        for request_id, start, num in zip(record.request_ids, record.starts, record.nums, strict=True):
            stored[request_id] = start + num
        for request_id in leaving.get(record.step_id, ()):
            stored.pop(request_id, None)
        arrivals = [arrival for i in stored if (arrival := history.trails[i].arrival) is not None]
        num_prompt = sum(arrival.num_prompt_tokens for arrival in arrivals)
        num_answer = sum(arrival.max_tokens for arrival in arrivals)
        reserved = (num_blocks - record.num_free_blocks) * block_size
        for i, num in enumerate((len(stored), sum(stored.values()), reserved, num_prompt, num_prompt + num_answer)):
            sums[i] += num
    num_requests, num_used, num_reserved, num_prompt, num_whole = sums
    return MemoryUse(
        num_requests=num_requests,
        num_used=num_used,
        num_reserved=num_reserved,
        num_prompt=num_prompt,
        num_whole=num_whole,
    )
