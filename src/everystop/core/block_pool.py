"""Owns the blocks of the KV cache: who is free, who is shared, who can be found by key; knows nothing of requests."""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Block ids 0 to num_blocks-1 with reference counts, a free list in eviction order, and a prefix index.

    A block is in exactly one of three states:

        in use     ref_count > 0; it may have a key, then others can share it
        cached     ref_count = 0 with a key: still matchable, evicted least recently used first
        blank      ref_count = 0 without a key: taken before any cached block is evicted

    so in use + cached + blank = num_blocks always.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self.ref_count = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out: blank and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but that a prefix could still match."""
        return len(self._cached)

    @property
    def cached(self) -> tuple[int, ...]:
        """Those blocks, in no order that means anything."""
        return tuple(dict.keys(self._cached))  # cheaper than the order of eviction

    def take(self, num: int) -> list[int] | None:
        """Hand out `num` private blocks, blank ones first, evicting the least recently used; None and no change if too
        few.
        """
        if num > self.num_free:
            return None
        taken = []
        for _ in range(num):
            block = self._blank.pop() if self._blank else self._evict()
            self.ref_count[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.withdraw(block)
        self.num_evicted += 1
        return block

    def find(self, key: bytes) -> int | None:
        """The block that holds `key`, in use or cached; it is not pinned by this."""
        return self._index.get(key)

    def share(self, block: int) -> None:
        """Add a reference; a cached block leaves the eviction order."""
        if self.ref_count[block] == 0:
            del self._cached[block]
        self.ref_count[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached (most recently used) or blank."""
        assert self.ref_count[block] > 0, f"block {block} released more often than taken"
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, key: bytes) -> bool:
        """Make an in-use block matchable under `key`; False if another block already holds that key."""
        assert self.ref_count[block] > 0
        assert self._keys[block] is None
        if key in self._index:
            return False
        self._index[key] = block
        self._keys[block] = key
        return True

    def withdraw(self, block: int) -> None:
        """Make a block unmatchable: its contents are wrong or about to be overwritten."""
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def is_published(self, block: int) -> bool:
        """The block has a key."""
        return self._keys[block] is not None

    def check_integrity(self, references: dict[int, int]) -> None:
        """Assert all invariants; `references` counts, per block, the tables and pending releases that hold it."""
        assert len(set(self._blank)) == len(self._blank)
        for block in range(self.num_blocks):
            assert self.ref_count[block] == references.get(block, 0), (
                f"block {block}: {self.ref_count[block]} references"
            )
        idle = {*self._blank, *self._cached}
        assert len(idle) == len(self._blank) + len(self._cached)
        assert idle == {b for b in range(self.num_blocks) if self.ref_count[b] == 0}
        assert all(self._keys[b] is None for b in self._blank)
        assert all(self._keys[b] is not None for b in self._cached)
        assert self._index == {k: b for b, k in enumerate(self._keys) if k is not None}
