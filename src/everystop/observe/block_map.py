"""What each block of the KV cache is used for, and by whom, as runs of equal neighbours: a view of `BlockEvent`."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from everystop.core.events import BlockEvent

FREE, PRIVATE, SHARED, EVICTABLE = "f", "p", "s", "e"
NOBODY = -1


class BlockRun(NamedTuple):
    """`num` neighbouring blocks of one kind and one owner.

    `kind` is FREE (nothing in it), PRIVATE (one holder), SHARED (several, as a common prefix is) or EVICTABLE (nobody
    holds it, a prefix can still match it). The `owner` of a held block is the first that boarded of those on board
    that have it in their table; NOBODY where a step on its way keeps it for one that has left.
    """

    kind: str
    num: int
    owner: int


def block_runs(event: BlockEvent) -> list[BlockRun]:
    """All blocks in the order of their ids.

    Example: 6 blocks, request 7 with the table (0, 2), request 9 with (0, 3), block 4 cached:

        block      0     1     2     3     4     5
        runs     (s 1 7)(f 1)(p 1 7)(p 1 9)(e 1)(f 1)
    """
    codes = [_FREE] * len(event.ref_counts)
    for block in event.cached:
        codes[block] = _EVICTABLE
    num_held = len(codes) - event.ref_counts.count(0)
    for request_id, table in reversed(event.tables):
        for block in table:
            codes[block] = _code(request_id, event.ref_counts[block])
    if sum(code >= _PRIVATE for code in codes) < num_held:  # some are in no table
        for block, num_references in enumerate(event.ref_counts):
            if num_references and codes[block] < _PRIVATE:
                codes[block] = _code(NOBODY, num_references)
    return [_run(code, len(list(blocks))) for code, blocks in groupby(codes)]


# A block as one number: free, evictable, or its owner and whether it is shared. Numbers are compared quickly.
_FREE, _EVICTABLE, _PRIVATE = range(3)


def _code(owner: int, num_references: int) -> int:
    return _PRIVATE + 2 * (owner - NOBODY) + (num_references > 1)


def _run(code: int, num: int) -> BlockRun:
    if code < _PRIVATE:
        return BlockRun(EVICTABLE if code == _EVICTABLE else FREE, num, NOBODY)
    owner, is_shared = divmod(code - _PRIVATE, 2)
    return BlockRun(SHARED if is_shared else PRIVATE, num, owner + NOBODY)
