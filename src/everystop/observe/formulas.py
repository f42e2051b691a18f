"""The arithmetic of batches: what lengths alone say of steps and slots, before anything runs.

A request of n output tokens decodes in n steps; prefill, the budget of a step and memory are left aside. `lengths` are
the output lengths in order of arrival, all there from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def batches(lengths: Sequence[int], num_slots: int) -> list[Sequence[int]]:
    """The lengths as static batching takes them: as many at once as there are slots."""
    return [lengths[i : i + num_slots] for i in range(0, len(lengths), num_slots)]


def static_steps(lengths: Sequence[int], num_slots: int) -> int:
    """Σ over batches of the longest: every batch lasts as long as its longest member."""
    return sum(max(batch) for batch in batches(lengths, num_slots))


def static_occupancy(lengths: Sequence[int], num_slots: int) -> float:
    """U = Σ lengths / (B × Σ over batches of the longest); of one batch, Σ lengths / (B × max length).

    Example, 16 slots, 15 answers of 20 tokens and one of 1,000: 1,300 / (16 × 1,000) = 8.1 %.
    """
    return sum(lengths) / (num_slots * static_steps(lengths, num_slots))


def continuous_steps(lengths: Sequence[int], num_slots: int) -> int:
    """Steps until all are done when each in turn takes the slot that is free first: Graham's list schedule, at most
    twice what any schedule needs.

    Example, 2 slots, lengths 5, 2, 2, 3: slots are free after 5 and 2, then 4, then 7: 7 steps; static takes 5 + 3.
    """
    ends = [0] * num_slots
    heapify(ends)
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return max(ends)
