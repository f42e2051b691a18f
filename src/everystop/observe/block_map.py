"""What each block of the KV cache is used for, and by whom, as runs of equal neighbours: a view of `BlockEvent`."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from everystop.core.events import BlockEvent

FREE, PRIVATE, SHARED, EVICTABLE = "f", "p", "s", "e"
NOBODY = -1
OWNERS_NAMED = 3


class BlockRun(NamedTuple):
    """`num` neighbouring blocks of one kind and the same owners.

    `kind` is FREE (nothing in it), PRIVATE (one holder), SHARED (several, as a common prefix is) or EVICTABLE (nobody
    holds it, a prefix can still match it). The owners of a held block are those on board that have it in their table,
    in the order of boarding: `num_owners` of them, `owner` the first, `others` the next two. There is none, and `owner`
    is NOBODY, where a step on its way keeps it for one that has left.
    """

    kind: str
    num: int
    owner: int = NOBODY
    num_owners: int = 0
    others: tuple[int, ...] = ()


def block_runs(event: BlockEvent) -> list[BlockRun]:
    """All blocks in the order of their ids.

    Example: 6 blocks, request 7 with the table (0, 2), request 9 with (0, 3), block 4 cached:

        block      0           1     2       3       4     5
        runs     (s 1 7 2 9)  (f 1) (p 1 7) (p 1 9) (e 1) (f 1)
    """
    num_references = event.ref_counts
    codes: list[int | tuple[int, ...]] = [_FREE] * len(num_references)
    for block in event.cached:
        codes[block] = _EVICTABLE
    shared: dict[int, list[int]] = {}
    for request_id, table in event.tables:
        private = _PRIVATE + request_id - NOBODY
        for block in table:
            if num_references[block] == 1:
                codes[block] = private
            else:
                shared.setdefault(block, []).append(request_id)
    for block, owners in shared.items():
        codes[block] = (len(owners), *owners[:OWNERS_NAMED])
    num_held = len(codes) - num_references.count(0)
    if len(codes) - codes.count(_FREE) - codes.count(_EVICTABLE) < num_held:  # some are in no table
        for block, num in enumerate(num_references):
            if num and codes[block] in (_FREE, _EVICTABLE):
                codes[block] = _PRIVATE if num == 1 else _OWNED_BY_NONE
    return [_run(code, len(list(blocks))) for code, blocks in groupby(codes)]


# A block as one number: free, evictable, or private of its owner. If it is shared: how many have it, and the first.
_FREE, _EVICTABLE, _PRIVATE = range(3)
_OWNED_BY_NONE = (0,)


def _run(code: int | tuple[int, ...], num: int) -> BlockRun:
    if isinstance(code, tuple):
        num_owners, *owners = code
        return BlockRun(SHARED, num, owners[0] if owners else NOBODY, num_owners, tuple(owners[1:]))
    if code < _PRIVATE:
        return BlockRun(EVICTABLE if code == _EVICTABLE else FREE, num)
    owner = code - _PRIVATE + NOBODY
    return BlockRun(PRIVATE, num, owner, int(owner != NOBODY))
