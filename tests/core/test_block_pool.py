"""BlockPool: every block in exactly one state, references as many as holders, keys that find what was published."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everystop.core.block_pool import BlockPool

KEYS = [bytes([i]) for i in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and release blocks; a model says what each key finds, and who is evicted."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references: Counter[int] = Counter()
        self.published: dict[bytes, int] = {}
        self.cached: list[int] = []  # in eviction order
        self.num_evicted = 0

    def key_of(self, block: int) -> bytes | None:
        return next((key for key, holder in self.published.items() if holder == block), None)

    @rule(num=st.integers(0, 9))
    def take(self, num: int) -> None:
        free = self.pool.num_blocks - len(+self.references)
        num_blank = free - len(self.cached)
        taken = self.pool.take(num)
        if num > free:
            assert taken is None
            return
        assert taken is not None
        assert len(set(taken)) == num
        assert not any(self.references[block] for block in taken)
        evicted, self.cached = self.cached[: max(0, num - num_blank)], self.cached[max(0, num - num_blank) :]
        assert set(evicted) <= set(taken), "the least recently used goes first"
        for block in evicted:
            del self.published[self.key_of(block)]  # type: ignore[arg-type]
        self.num_evicted += len(evicted)
        self.references.update(taken)

    @rule(key=st.sampled_from(KEYS))
    def share(self, key: bytes) -> None:
        block = self.pool.find(key)
        assert block == self.published.get(key)
        if block is not None:
            self.pool.share(block)
            self.references[block] += 1
            if block in self.cached:
                self.cached.remove(block)

    @precondition(lambda self: +self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.references)))
        self.pool.release(block)
        self.references[block] -= 1
        if not self.references[block] and self.key_of(block) is not None:
            self.cached.append(block)

    @precondition(lambda self: +self.references)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(+self.references)))
        if self.pool.is_published(block):
            return
        assert self.pool.publish(block, key) == (key not in self.published)
        self.published.setdefault(key, block)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.withdraw(block)
        self.published.pop(self.key_of(block) or b"none", None)
        if block in self.cached:
            self.cached.remove(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity(dict(+self.references))
        assert self.pool.num_free == self.pool.num_blocks - len(+self.references)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_evicted == self.num_evicted
        assert {key: self.pool.find(key) for key in KEYS} == {key: self.published.get(key) for key in KEYS}


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestPoolMachine = PoolMachine.TestCase


def test_blank_blocks_are_taken_before_any_cached_one_is_evicted() -> None:
    pool = BlockPool(4)
    for block, key in zip(pool.take(2) or [], KEYS, strict=False):
        pool.publish(block, key)
        pool.release(block)
    assert pool.take(2) is not None
    assert (pool.num_evicted, pool.num_cached) == (0, 2)


def test_one_needed_block_evicts_one_cached_block() -> None:
    pool = BlockPool(100)
    for i, block in enumerate(pool.take(100) or []):
        pool.publish(block, i.to_bytes(1, "little"))
        pool.release(block)
    assert pool.take(1) is not None
    assert (pool.num_evicted, pool.num_cached) == (1, 99)


def test_recycled_block_is_not_found_under_its_old_key() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1) or []
    pool.publish(block, b"old")
    pool.release(block)
    assert pool.take(1) == [block]
    assert pool.find(b"old") is None
    pool.publish(block, b"new")
    assert pool.find(b"new") == block


def test_block_released_by_one_of_two_holders_stays_with_the_other() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1) or []
    pool.publish(block, b"key")
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 0
    assert pool.take(1) is None
    pool.release(block)
    assert pool.num_free == 1


def test_releasing_more_often_than_taken_is_caught() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1) or []
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)
