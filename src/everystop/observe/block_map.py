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
    kinds = [FREE] * len(event.ref_counts)
    owners = [NOBODY] * len(kinds)
    for block in event.cached:
        kinds[block] = EVICTABLE
    for request_id, table in reversed(event.tables):
        for block in table:
            owners[block] = request_id
    for block, num_references in enumerate(event.ref_counts):
        if num_references:
            kinds[block] = PRIVATE if num_references == 1 else SHARED
    return [
        BlockRun(kind, sum(1 for _ in blocks), owner)
        for (kind, owner), blocks in groupby(zip(kinds, owners, strict=True))
    ]
