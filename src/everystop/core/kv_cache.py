"""Owns the block tables: prefix match, whole-need allocation, growth, forks, publication; decides nothing about who
gets what.
"""

from __future__ import annotations

from everystop.core.block_pool import BlockPool
from everystop.core.request import Request, extend_block_keys


class KVCache:
    """Block tables over a `BlockPool`; every allocation is all or nothing, and a refusal is None without side effects.

    A request of 70 known tokens with block_size 32 and a prefix hit of one block:

        position     0 ........ 31 | 32 ....... 63 | 64 .. 70 .. 95
        block table      shared    |    private    |  private (tail)
                     matched, pinned  taken at admission: blocks for 70 + 1 tokens

    Hits are whole blocks, at most (num_tokens - 1) // block_size, so at least one token is computed and the tail is
    private; fewer while the request has to compute part of its prompt itself.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def num_token_slots(self) -> int:
        """Longest sequence that fits an empty cache, in tokens."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix, stopping at the first miss; nothing is pinned."""
        if not self.enable_prefix_caching:
            return []
        extend_block_keys(request, self.block_size)
        matched = []
        for i in range(request.num_reusable_tokens // self.block_size):
            block = self.pool.find(request.block_keys[i])
            if block is None:
                break
            matched.append(block)
        return matched

    def num_matched_tokens(self, request: Request) -> int:
        """Length of the longest cached prefix, in tokens; nothing is pinned."""
        return len(self.match(request)) * self.block_size

    def shortfall(self, request: Request, shared: list[int]) -> tuple[int, int]:
        """(need, have): private blocks that `admit` would take, and free blocks left once `shared` is pinned."""
        need = self.num_blocks_for(request.num_tokens + 1) - len(shared)
        have = self.pool.num_free - sum(1 for block in shared if self.pool.ref_count[block] == 0)
        return need, have

    def num_private_tokens(self, request: Request) -> int:
        """Tokens, computed or on their way, that stand in blocks of this request alone."""
        left, private = request.num_scheduled_through, 0
        for block in request.block_table:
            if left <= 0:
                break
            if self.pool.ref_count[block] == 1:
                private += min(left, self.block_size)
            left -= self.block_size
        return private

    def admit(self, request: Request, shared: list[int]) -> bool:
        """Give the request its whole table: `shared` blocks pinned, then private ones for all known tokens and one
        more.

        False, and nothing is changed, if the private blocks are not free.
        """
        need, have = self.shortfall(request, shared)
        if need > have:
            return False
        for block in shared:
            self.pool.share(block)
        private = self.pool.take(need)
        assert private is not None
        request.block_table = shared + private
        request.num_published_blocks = len(shared)
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the table to hold `num_tokens` tokens; the new block ids (often none), or None if too few are free."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return []
        new = self.pool.take(missing)
        if new is not None:
            request.block_table += new
        return new

    def rematch(self, request: Request, start: int) -> int:
        """Replace the request's own blocks from position `start` on by ones that have become matchable meanwhile.

        Returns the new start: the position after the last whole block found, or `start` if there is none. The replaced
        blocks go back to the pool; no plan that has been made reads or writes them.
        """
        index = start // self.block_size
        last = request.num_reusable_tokens // self.block_size
        while index < last:
            found = self.pool.find(request.block_keys[index])
            if found is None or found == request.block_table[index]:
                break
            self.pool.share(found)
            self.pool.release(request.block_table[index])
            request.block_table[index] = found
            index += 1
            start = index * self.block_size
            request.num_published_blocks = index
        return start

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make all full blocks of the first `num_tokens` tokens matchable; their K and V must be written before anyone
        attends.
        """
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        if num_full <= request.num_published_blocks:
            return
        extend_block_keys(request, self.block_size)
        for i in range(request.num_published_blocks, num_full):
            block = request.block_table[i]
            if not self.pool.is_published(block):
                self.pool.publish(block, request.block_keys[i])
        request.num_published_blocks = num_full

    def withdraw(self, request: Request, start: int) -> None:
        """Take back the publication of blocks with positions from `start` on: they were not, or wrongly, computed."""
        for i in range(start // self.block_size, request.num_published_blocks):
            self.pool.withdraw(request.block_table[i])
        request.num_published_blocks = min(request.num_published_blocks, start // self.block_size)

    def release(self, table: list[int]) -> None:
        """Drop one reference to each block of a table, tail first, so that tails are evicted before heads."""
        for block in reversed(table):
            self.pool.release(block)
