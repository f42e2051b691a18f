"""Whether a request should board now: by what it and the running ones are expected to hold at their peak, judged by the
lengths of past outputs (Past-Future, arXiv 2507.10150).

It knows lengths and counts of blocks. Who is asked about, and who boards in the end, the scheduler decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Sequence
from math import isqrt
from typing import NamedTuple

from everystop.core.batch import Batch
from everystop.core.kv_cache import KVCache
from everystop.core.request import Request

ADMISSIONS = ("expected", "greedy")
MAX_LENGTHS = 256
NUM_DOUBTS = 4
_ONE = 1 << 32
_GOLDEN = 2_654_435_769  # 2**32 over the golden ratio: consecutive multiples spread evenly over [0, 2**32)


class OutputLengths:
    """How long the last 256 outputs were that came to their own end: few enough to follow traffic that changes."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, num_output_tokens: int) -> None:
        """One more has ended; the oldest is forgotten."""
        self._latest.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)
        if len(self._latest) > MAX_LENGTHS:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def expect(self, num_output_tokens: int, most: int, share: int) -> int:
        """How long an output will be that has come this far and may come to `most`: of all known lengths beyond this,
        the one below which a `share` of them (of 2**32) lies.

        Four lengths that nobody has seen are taken for known, half-way between this and `most`: they are all there is
        to go by at the start, and count for little once many are known.

        Example, known lengths 10, 20, 30, 40, an output of 15 tokens that may come to 55: of 20, 30, 35, 35, 35, 35, 40
        shares up to 1/7 get 20, up to 2/7 30, up to 6/7 35.
        """
        known = self._sorted
        first = bisect_right(known, num_output_tokens)
        unseen = (num_output_tokens + most) // 2
        num_below = bisect_right(known, unseen) - first
        place = (len(known) - first + NUM_DOUBTS) * share // _ONE
        if place < num_below:
            return known[first + place]
        return unseen if place < num_below + NUM_DOUBTS else known[first + place - NUM_DOUBTS]


class Prospect(NamedTuple):
    """A request as it is expected to go on: it has `num_tokens`, and brings `num_remaining` more, one a step."""

    num_remaining: int
    num_tokens: int


def peak_blocks(prospects: Sequence[Prospect], block_size: int, num_shared: int) -> int:
    """The most blocks that these requests hold at once if all go on together, each to its expected end.

    The peak is just before one of them ends; it and those that outlive it then hold what they have now and as many
    tokens more as it has left. Each wastes half a block on average. `num_shared` is how many blocks fewer there are now
    than their tables hold together, since some are in several; it is taken to fall with the number of requests.

    Example, block_size 1: (remaining 5, has 10) and (remaining 2, has 20). Before the second ends they hold 12 + 22,
    before the first does it holds 15: the peak is 34.
    """
    num_tokens = peak = 0
    num_others = max(1, len(prospects) - 1)
    for i, prospect in enumerate(sorted(prospects, reverse=True), start=1):
        num_tokens += prospect.num_tokens
        num_held = num_tokens + i * prospect.num_remaining + i * (block_size - 1) // 2
        peak = max(peak, num_held // block_size - num_shared * (i - 1) // num_others)
    return peak


class Admission:
    """Admits while the expected peak fits the pool.

    Expected lengths are not drawn but dealt: request i stands for the share i · φ mod 1 of all that are longer than it
    is, so those who run together stand for the whole distribution, some short and some long, and the same calls give
    the same answers. Chance makes a sum of n lengths that vary like their mean deviate by one part in √n of it: two
    thirds of that are kept free. A refusal stands until somebody has left: until then the others only grow.
    """

    def __init__(self, kv: KVCache, limit_tokens: int) -> None:
        self.lengths = OutputLengths()
        self._kv = kv
        self._limit_blocks = kv.num_blocks_for(limit_tokens)
        self._refused = (-1, -1)
        self._refusal = (0, 0)

    def shortfall(
        self, picked: Request, shared: list[int], others: Collection[Request], batch: Batch
    ) -> tuple[int, int] | None:
        """(need, have) in blocks, growth of all included, if `picked` should wait for `others` to end; else None.

        `shared` are blocks that it would share; `others` are those who run and would not make way for it.
        """
        if not others or (len(others) + 1) * self._limit_blocks <= self._kv.pool.num_blocks:
            return None
        key = (picked.request_id, batch.num_departures)
        if key == self._refused:
            return self._refusal
        num_blocks = self._kv.pool.num_blocks
        together = [*others, picked]
        if sum(self._kv.num_blocks_for(r.num_prompt_tokens + r.max_tokens) for r in together) <= num_blocks:
            return None
        num_shared = self._num_shared(shared, others)
        peak = peak_blocks([self._prospect(r) for r in together], self._kv.block_size, num_shared)
        peak += 200 * peak // (3 * isqrt(10_000 * len(together)))
        if peak <= num_blocks:
            return None
        have = self._kv.pool.num_free
        self._refused, self._refusal = key, (have + peak - num_blocks, have)
        return self._refusal

    def _prospect(self, request: Request) -> Prospect:
        num_tokens = request.num_tokens + request.num_pending_samples
        num_output = num_tokens - request.num_prompt_tokens
        expected = self.lengths.expect(num_output, request.max_tokens, request.request_id * _GOLDEN % _ONE)
        return Prospect(max(1, min(expected, request.max_tokens) - num_output), num_tokens)

    def _num_shared(self, shared: list[int], others: Collection[Request]) -> int:
        """How many blocks fewer these requests hold together than their tables have entries, one with `shared`."""
        num_in_tables = sum(len(request.block_table) for request in others)
        blocks = {block for request in others for block in request.block_table}
        return num_in_tables - len(blocks) + sum(1 for block in shared if block in blocks)
