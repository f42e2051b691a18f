"""The prefix cache: whole blocks, never the last token, no hit after a hole, no meeting of strangers."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, make_request, make_scheduler

from everystop.core.block_pool import BlockPool
from everystop.core.events import AdmitEvent
from everystop.core.kv_cache import KVCache
from everystop.core.request import Request, extend_block_keys


def keys(prompt: list[int], block_size: int = 2, **fields: object) -> list[bytes]:
    request = make_request(0, prompt, **fields)
    extend_block_keys(request, block_size)
    return request.block_keys


def cached(harness: Harness, request_id: int) -> int:
    return harness.requests[request_id].num_cached_tokens


def serve(harness: Harness, request_id: int, prompt: list[int], **fields: object) -> Request:
    fields = {"max_tokens": 3} | fields
    request = harness.add(make_request(request_id, prompt, **fields))
    harness.run()
    return request


# ------------------------------------------------------------------------ keys


def test_different_tokens_parents_and_borders_give_different_keys() -> None:
    prompts = [
        [65, 66],
        [65 + 256, 66],
        [65 + 65_536, 66],
        [66, 65],
        [1, 23],
        [12, 3],
        [0, 0],
        [0, 0, 0, 0],
        [65, 66, 65, 66],
        [66, 65, 65, 66],
    ]
    last = [keys(prompt)[-1] for prompt in prompts]
    assert len(set(last)) == len(prompts)


def test_keys_of_a_longer_prompt_begin_with_those_of_the_shorter() -> None:
    assert keys([1, 2, 3, 4, 5, 6])[:2] == keys([1, 2, 3, 4, 9])
    assert len(keys([1, 2, 3, 4, 9])) == 2


def test_adapter_and_salt_of_the_same_name_never_meet() -> None:
    named = [
        keys([1, 2], adapter="x"),
        keys([1, 2], cache_salt="x"),
        keys([1, 2]),
        keys([1, 2], adapter="x", cache_salt="x"),
        keys([1, 2], cache_salt="x;adapter:1:x"),
        keys([1, 2], adapter="1:x", cache_salt=""),
    ]
    assert len({tuple(chain) for chain in named}) == len(named)


def test_given_keys_stand_and_the_chain_goes_on_from_them() -> None:
    given = keys([1, 2], block_keys=[b"given"])
    assert given == [b"given"]
    assert keys([1, 2, 3, 4], block_keys=[b"given"]) == [b"given", keys([9, 9, 3, 4], block_keys=[b"given"])[1]]


# ------------------------------------------------------------------------ hits


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 31, 32, 33, 48])
def test_prompt_sent_twice_reuses_whole_blocks_but_never_the_last_token(num_prompt_tokens: int, depth: int) -> None:
    harness = Harness(make_scheduler(), depth=depth)
    prompt = list(range(num_prompt_tokens))
    serve(harness, 0, prompt)
    serve(harness, 1, prompt)
    assert cached(harness, 0) == 0
    assert cached(harness, 1) == (num_prompt_tokens - 1) // 16 * 16
    assert harness.output(0) == harness.output(1)


def test_hits_end_at_the_first_hole() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=16))
    prompt = list(range(50))
    request = serve(harness, 0, prompt)
    pool = harness.scheduler.kv.pool
    first = pool.find(request.block_keys[0])
    assert first is not None
    pool.withdraw(first)
    serve(harness, 1, prompt)
    assert cached(harness, 1) == 32  # block 0 is computed again; then blocks 1 and 2, still there, are skipped
    admitted = [e.num_cached_tokens for e in harness.events if isinstance(e, AdmitEvent)]
    assert admitted == [0, 0]


def test_only_full_blocks_are_shared() -> None:
    harness = Harness(make_scheduler())
    serve(harness, 0, list(range(20)), max_tokens=2)
    serve(harness, 1, [*range(20), *range(500, 520)])
    assert cached(harness, 1) == 16


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat() -> None:
    harness = Harness(make_scheduler())
    first = serve(harness, 0, list(range(20)), max_tokens=30)
    serve(harness, 1, [*first.token_ids, 7, 8, 9])
    assert cached(harness, 1) == 48  # of 49 computed tokens: the last one was sampled, not computed


@pytest.mark.parametrize("salts", [("a", "b"), ("a", ""), ("", "b")])
def test_tenants_with_different_salts_never_hit_each_other(salts: tuple[str, str]) -> None:
    harness = Harness(make_scheduler())
    prompt = list(range(40))
    for i, salt in enumerate((*salts, *salts)):
        serve(harness, i, prompt, cache_salt=salt)
    assert [cached(harness, i) for i in range(4)] == [0, 0, 32, 32]


def test_recycled_blocks_give_misses_not_foreign_content() -> None:
    harness = Harness(make_scheduler(num_blocks=8, block_size=4))
    prompts = [[100 * i + j for j in range(20)] for i in range(4)]
    for i, prompt in enumerate([*prompts, *prompts]):
        serve(harness, i, prompt)
    assert harness.scheduler.kv.pool.num_evicted > 0


def test_nothing_is_cached_when_the_cache_is_off() -> None:
    harness = Harness(make_scheduler(prefix_caching=False))
    serve(harness, 0, list(range(40)))
    serve(harness, 1, list(range(40)))
    assert cached(harness, 1) == 0
    assert harness.scheduler.kv.pool.num_cached == 0


def test_tails_are_evicted_before_heads() -> None:
    harness = Harness(make_scheduler(num_blocks=6, block_size=4))
    serve(harness, 0, list(range(17)), max_tokens=1)
    serve(harness, 1, [99] * 9, max_tokens=2)
    serve(harness, 2, list(range(17)), max_tokens=1)
    assert cached(harness, 2) == 12


def test_row_that_fails_leaves_nothing_to_be_found() -> None:
    harness = Harness(make_scheduler(max_num_batched_tokens=16))
    harness.add(make_request(0, list(range(40)), max_tokens=3))
    harness.turn()
    harness.turn()
    harness.runner.fail[0] = "nan_logits"
    harness.run()
    assert harness.finished[0].reason == "error"
    serve(harness, 1, list(range(40)))
    assert cached(harness, 1) == 0


@pytest.mark.parametrize("leaves", ["preempted", "aborted"])
def test_row_that_fails_after_its_request_has_left_leaves_nothing_to_be_found(leaves: str) -> None:
    """At depth 1 a request may lose its place, or its client, while the row is on its way that shows the fault."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, max_num_batched_tokens=16)
    harness = Harness(scheduler, depth=1)
    harness.runner.fail[0] = "nan_logits"  # the first row that samples: the last of three chunks
    request = harness.add(make_request(0, list(range(40)), max_tokens=3, priority=5))
    for _ in range(3):
        harness.turn()
    pool = scheduler.kv.pool
    assert all(pool.find(key) is not None for key in request.block_keys[:2])
    if leaves == "preempted":
        harness.add(make_request(1, 20, max_tokens=3, priority=0))
    else:
        harness.abort(0)
    harness.run()
    assert harness.counts["preemptions"] == (leaves == "preempted")
    assert harness.finished[0].reason == ("error" if leaves == "preempted" else "abort")
    assert [pool.find(key) for key in request.block_keys[:2]] == [None, None]


def test_request_aborted_in_flight_leaves_no_block_that_its_row_may_spoil() -> None:
    harness = Harness(make_scheduler())
    harness.add(make_request(0, list(range(40)), max_tokens=3))
    harness.abort_before_execution.append(0)
    harness.turn()
    serve(harness, 1, list(range(40)))
    assert cached(harness, 1) == 0


def test_hit_blocks_are_pinned_when_they_are_found() -> None:
    """Between arrival and admission the blocks of a hit may be evicted: what counts is what is there at admission."""
    harness = Harness(make_scheduler(num_blocks=8, block_size=4, max_num_seqs=1))
    serve(harness, 0, list(range(13)), max_tokens=1)
    harness.add(make_request(1, 20, max_tokens=10))
    harness.turn()
    harness.add(make_request(2, list(range(13)), max_tokens=1))
    harness.run()
    assert cached(harness, 2) < 12


# ---------------------------------------------------------------------- bursts


@pytest.mark.parametrize("depth", [0, 1])
def test_burst_with_a_common_prefix_computes_it_once(depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    """64 requests, 32 at once, over a common prefix of 512 tokens."""
    rng = random.Random(5)
    scheduler = make_scheduler(num_blocks=2_000, block_size=32, max_num_seqs=32, max_num_batched_tokens=256)
    harness = Harness(scheduler, depth=depth)
    prefix = list(range(512))
    prompts = [[*prefix, *(rng.randrange(1000) for _ in range(rng.randint(8, 88)))] for _ in range(64)]
    waiting = list(enumerate(prompts))
    while waiting or harness.scheduler.has_work:
        while waiting and len(harness.scheduler.requests) < 32:
            i, prompt = waiting.pop(0)
            harness.add(make_request(i, prompt, max_tokens=20))
        harness.turn()
    computed = sum(
        min(row.start + row.num_tokens, len(prompts[row.request_id])) - row.start
        for plan in harness.plans
        for row in plan.rows
        if row.start < len(prompts[row.request_id])
    )
    ideal = 512 + sum(len(prompt) - 512 for prompt in prompts)
    with capsys.disabled():
        print(f"\nshared burst at depth {depth}: {computed:,} prompt tokens computed, ideal {ideal:,}")
    assert ideal <= computed <= 512 + 64 * 88
    assert computed <= 1.05 * ideal


def test_prompts_that_grow_side_by_side_share_what_either_has_computed() -> None:
    """Two long prompts that begin alike: the second skips every block that the first fills meanwhile."""
    harness = Harness(make_scheduler(num_blocks=200, max_num_batched_tokens=32))
    for i in range(2):
        harness.add(make_request(i, [*range(1_000), i], max_tokens=1))
    harness.run()
    assert harness.num_computed_tokens() <= 1_000 + 1 + 1 + 2 * 16


# ----------------------------------------------------------- tables and blocks


def test_hundred_thousand_random_operations_keep_the_pool_whole() -> None:
    rng = random.Random(17)
    pool = BlockPool(40)
    held: list[int] = []
    content: dict[int, bytes] = {}
    for i in range(100_000):
        action = rng.random()
        if action < 0.35:
            for block in pool.take(rng.randint(1, 3)) or []:
                content.pop(block, None)
                held.append(block)
        elif action < 0.7 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action < 0.85 and held:
            block, key = rng.choice(held), bytes([rng.randrange(60)])
            if not pool.is_published(block) and pool.publish(block, key):
                content[block] = key
        else:
            key = bytes([rng.randrange(60)])
            found = pool.find(key)
            if found is not None:
                assert content[found] == key
                pool.share(found)
                held.append(found)
        if i % 500 == 0:
            pool.check_integrity({block: held.count(block) for block in held})
    assert pool.num_evicted > 1_000


def test_refusals_change_nothing() -> None:
    kv = KVCache(num_blocks=4, block_size=4, enable_prefix_caching=True)
    first = make_request(0, list(range(9)))
    assert kv.admit(first, kv.match(first))
    kv.publish(first, 9)
    second = make_request(1, [*range(9), *range(50, 60)])
    for _ in range(100):
        shared = kv.match(second)
        assert len(shared) == 2
        assert not kv.admit(second, shared)
        assert second.block_table == []
        assert kv.grow(first, 100) is None
        kv.pool.check_integrity(dict.fromkeys(first.block_table, 1))
