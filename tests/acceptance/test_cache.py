"""Acceptance cases of the KV cache: what is found is right, what is gone is gone, and nothing stays behind."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.model_server import ModelServer
from tests.acceptance.test_scheduling import match_everything
from tests.core.fuzz import fuzz
from tests.core.harness import Harness, make_request, make_scheduler
from tests.core.test_memory import leftovers, serve
from tests.measuring import rss_bytes
from tests.runner.invariance import GREEDY, Prompt, Setting, assert_same, serve_alone
from tests.runner.invariance import serve as serve_model
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.core import request as request_module
from everystop.core.block_pool import BlockPool
from everystop.core.kv_cache import KVCache
from everystop.core.request import Request
from everystop.core.siblings import Siblings
from everystop.model.weights import LoadedModel
from everystop.observe import history

LENGTHS = (15, 16, 17, 31, 32, 33)
ROOT = Path(__file__).parents[2]


# --------------------------------------------------------------------- 16: hits at block borders


def check_ac_16() -> None:
    """Each prompt twice, then once more without its first block; the harness compares all answers with the oracle."""
    harness = Harness(make_scheduler())
    for i, length in enumerate(LENGTHS):
        prompt = range(1000 * i, 1000 * i + length)
        for turn in range(2):
            harness.add(make_request(2 * i + turn, prompt, max_tokens=5))
            harness.run(max_turns=50)
            num_cached = harness.finished[2 * i + turn].num_cached_tokens
            assert num_cached == turn * ((length - 1) // 16 * 16)
    pool = harness.scheduler.kv.pool
    first, second = harness.requests[11].block_keys[:2]  # of the longest prompt
    gone = pool.find(first)
    assert gone is not None
    pool.withdraw(gone)
    harness.add(make_request(99, range(5000, 5033), max_tokens=5))
    assert pool.find(second) is not None, "the block behind the hole is still there"
    harness.run(max_turns=50)
    assert harness.finished[99].num_cached_tokens == 0, "a hit behind a hole"


def test_ac_16_hits_end_before_the_last_token_and_at_the_first_hole() -> None:
    check_ac_16()


@pytest.mark.model
def test_ac_16_on_the_embedded_model(smollm2: LoadedModel) -> None:
    """Bitwise: tokens and log-probabilities of the second request are those of the first, and of one alone."""
    for length in LENGTHS:
        tokens = tuple(range(500 + 40 * length, 500 + 41 * length))
        first = Prompt(tokens, replace(GREEDY, max_tokens=4))
        second = replace(first, after=lambda tokens: len(tokens) == 4)
        run = serve_model(smollm2, Setting(block_size=16, prefix_caching=True), [first, second])
        assert run.num_hits == (length > 16)
        assert_same(run, serve_alone(smollm2, [first, second]))


def test_mutant_ac_16_every_token_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "match", match_everything)
    with pytest.raises(AssertionError, match="nothing was done though requests are left"):
        check_ac_16()


def test_mutant_ac_16_counts_on_behind_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    def match(kv: KVCache, request: Request) -> list[int]:
        request_module.extend_block_keys(request, kv.block_size)
        keys = request.block_keys[: (request.num_tokens - 1) // kv.block_size]
        return [block for block in map(kv.pool.find, keys) if block is not None]

    monkeypatch.setattr(KVCache, "match", match)
    with pytest.raises(AssertionError, match="diverged from what it yields alone"):
        check_ac_16()


# --------------------------------------------------------------------- 17: the pool


def test_ac_17_hundred_thousand_random_operations_keep_every_block_accounted_for() -> None:
    """What a key finds was published under that key, and has not been handed out since."""
    rng = random.Random(17)
    pool, held, contents = BlockPool(12), Counter[int](), dict[int, bytes]()
    keys = [bytes([i]) for i in range(20)]
    counts: Counter[str] = Counter()
    for _ in range(100_000):
        operation = rng.choice(("take", "share", "publish", "withdraw", "release", "release"))
        counts[operation] += 1
        if operation == "take":
            num_free = pool.num_free
            taken = pool.take(num := rng.randint(0, 4))
            assert (taken is None) == (num > num_free)
            for block in taken or ():
                assert not held[block]
                held[block] += 1
                contents.pop(block, None)  # it will be overwritten
        elif operation == "share":
            found = pool.find(key := rng.choice(keys))
            counts["hits"] += found is not None
            if found is not None:
                assert contents[found] == key, "a key finds a block of other contents"
                pool.share(found)
                held[found] += 1
        elif operation == "withdraw":
            pool.withdraw(block := rng.randrange(12))
            contents.pop(block, None)
        elif +held:
            block = rng.choice(sorted(+held))
            if operation == "release":
                pool.release(block)
                held[block] -= 1
            elif not pool.is_published(block) and pool.publish(block, key := rng.choice(keys)):
                contents[block] = key
        pool.check_integrity(dict(+held))
        assert pool.num_free == 12 - len(+held)
    assert counts["hits"] > 1_000
    assert pool.num_evicted > 1_000
    for block in list(held.elements()):
        pool.release(block)
    assert pool.num_free == 12


# --------------------------------------------------------------------- 18, 19, 20: keys

Keys = Callable[[Sequence[int]], list[bytes]]


def keys_of(tokens: Sequence[int], **fields: Any) -> list[bytes]:
    """The block keys of a prompt, blocks of 16 tokens."""
    request = make_request(0, tokens, **fields)
    request_module.extend_block_keys(request, 16)
    return request.block_keys


def check_ac_18() -> None:
    plain = list(range(100, 132))
    others = {
        "equal modulo 256": [token + 256 for token in plain],
        "equal modulo 65,536": [token + 65_536 for token in plain],
        "one token equal modulo 256": [plain[0] + 256, *plain[1:]],
        "digits moved across a border": [10, 0, *plain[2:]],
        "two tokens swapped": [plain[1], plain[0], *plain[2:]],
    }
    assert len(set(keys_of(plain))) == 2
    assert keys_of([1, 23] * 8) != keys_of([12, 3] * 8), "keys are equal though digits moved"
    for name, tokens in others.items():
        assert not set(keys_of(plain)) & set(keys_of(tokens)), f"keys are equal though {name}"
    same_block = [plain[i % 16] for i in range(32)]
    first, second = keys_of(same_block)
    assert first != second, "keys are equal though the parents differ"
    assert keys_of([*range(16), *plain[16:]])[1] != keys_of(plain)[1], "keys are equal though the parents differ"


def test_ac_18_keys_differ_where_tokens_borders_or_parents_do() -> None:
    check_ac_18()


def _as_bytes(block: Sequence[int], parent: bytes) -> bytes:
    return parent + bytes(token & 255 for token in block)


def _as_digits(block: Sequence[int], parent: bytes) -> bytes:
    return parent + "".join(map(str, block)).encode()


def _without_parent(block: Sequence[int], parent: bytes) -> bytes:
    return repr(list(block)).encode()


@pytest.mark.parametrize("write", [_as_bytes, _as_digits, _without_parent])
def test_mutant_ac_18_keys_that_lose_something(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Sequence[int], bytes], bytes]
) -> None:
    def extend(request: Request, block_size: int) -> None:
        parent = b"root"
        for start in range(0, request.num_tokens // block_size * block_size, block_size):
            parent = hashlib.sha256(write(request.token_ids[start : start + block_size], parent)).digest()
            request.block_keys.append(parent)

    monkeypatch.setattr(request_module, "extend_block_keys", extend)
    with pytest.raises(AssertionError, match="keys are equal though"):
        check_ac_18()


def test_ac_19_adapter_and_salt_of_one_name_never_meet() -> None:
    tokens = range(32)
    kinds = [{}, {"adapter": "x"}, {"cache_salt": "x"}, {"adapter": "x", "cache_salt": "x"}]
    kinds += [{"cache_salt": "x;adapter:1:x"}, {"cache_salt": "", "adapter": ";adapter:1:x"}]
    found = [key for fields in kinds for key in keys_of(tokens, **fields)]
    assert len(set(found)) == len(found) == 2 * len(kinds)


def test_ac_20_prompts_are_found_under_their_own_salt_only() -> None:
    harness = Harness(make_scheduler())
    cached = {}
    for i, salt in enumerate(["a", "b", "", "a", "b", ""]):
        harness.add(make_request(i, range(40), max_tokens=2, cache_salt=salt))
        harness.run(max_turns=50)
        cached[i] = harness.finished[i].num_cached_tokens
    assert list(cached.values()) == [0, 0, 0, 32, 32, 32]


# --------------------------------------------------------------------- 22: clients that leave


def open_descriptors() -> int:
    """Of this process, which is the server's too."""
    return len(os.listdir("/proc/self/fd"))


def check_ac_22(server: ParrotServer, num_streams: int, deadline_s: float = 60.0) -> None:
    assert server.complete("warm up", max_tokens=1)[0] == 200
    wait_until(lambda: server.num_free_blocks == server.num_blocks, deadline_s)
    num_descriptors = open_descriptors()
    for i in range(num_streams):
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 500, "n": 1 + i % 2}
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        for _ in range(1 + i % 3):
            assert answer.readline().startswith(b"data: ")
            answer.readline()
        answer.close()
        connection.close()
    wait_until(lambda: not server.scheduler.requests)
    wait_until(lambda: server.num_free_blocks == server.num_blocks, deadline_s)
    wait_until(lambda: open_descriptors() <= num_descriptors)
    assert server.service.state.board.num_sequences == 0
    assert server.complete("ok", max_tokens=1)[0] == 200


@pytest.mark.model
def test_ac_22_streams_closed_after_a_few_events_leave_nothing(model_server: ModelServer) -> None:
    check_ac_22(model_server, num_streams=300)


def test_mutant_ac_22_a_block_lost_with_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    release = KVCache.release
    with parrot(num_blocks=400) as server:
        monkeypatch.setattr(KVCache, "release", lambda kv, table: release(kv, table[:-1]))
        with pytest.raises(AssertionError, match="it never came true"):
            check_ac_22(server, num_streams=10, deadline_s=1.0)


# --------------------------------------------------------------------- 23: memory


def check_ac_23(num_groups: int) -> None:
    """Groups of two choices of one token each; blocks of the allocator are counted, which RSS hides below its pages."""
    scheduler = make_scheduler(max_num_seqs=32)
    serve(scheduler, 0, 1_000)
    gc.collect()
    blocks, rss = sys.getallocatedblocks(), rss_bytes()
    serve(scheduler, 100_000, num_groups)
    gc.collect()
    num_grown, grown_bytes = sys.getallocatedblocks() - blocks, rss_bytes() - rss
    assert not leftovers(scheduler), f"maps that are not empty: {leftovers(scheduler)}"
    assert num_grown < 500
    assert grown_bytes < num_groups / 10_000 * (1 << 20)


def test_ac_23_twenty_thousand_requests_of_two_choices_leave_nothing() -> None:
    """In a process of its own, whose memory no other test moves."""
    run_alone("check_ac_23(20_000)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ac_23_over_http() -> None:
    """The same number through server, board and history."""
    run_alone("check_ac_23_over_http(20_000)")


def run_alone(call: str) -> None:
    """A check of this module in a fresh process."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-c", f"from tests.acceptance.test_cache import *; {call}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def check_ac_23_over_http(num_requests: int) -> None:
    history.RECENT_STEPS = 500  # what is remembered of steps is full before it is measured, instead of growing to 30 MB
    body = json.dumps({"prompt": "abc", "n": 2, "max_tokens": 1})
    with parrot(explain_history=10) as server:
        connection = server.connect()

        def send(num: int) -> None:
            for _ in range(num):
                connection.request("POST", "/v1/completions", body)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200

        send(2_000)
        gc.collect()
        before = rss_bytes()
        send(num_requests)
        wait_until(lambda: server.engine._is_at_rest)
        gc.collect()
        grown = rss_bytes() - before
        assert grown < num_requests / 10_000 * (1 << 20), f"{grown:,} bytes more after {num_requests:,} requests"
        assert not leftovers(server.scheduler)
        assert server.service.state.board.num_sequences == 0
        connection.close()


def test_mutant_ac_23_groups_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(siblings: Siblings, request: Request) -> None:
        siblings._groups[request.group_id].remove(request)

    monkeypatch.setattr(Siblings, "leave", leave)
    with pytest.raises(AssertionError, match=r"maps that are not empty: \{'_groups': "):
        check_ac_23(200)


# --------------------------------------------------------------------- 24: fuzzing


def check_ac_24(num_steps: int) -> None:
    """Arrivals, aborts, preemption, sharing, budgets, groups, failures under every policy; see `tests.core.fuzz`."""
    coverage: Counter[str] = Counter()
    for seed in count(1):
        if coverage["steps"] >= num_steps:
            break
        coverage += fuzz(min(8_000, num_steps), seed=seed)
    per_step = {"preemptions": 0.005, "prefix hits": 0.01, "forks": 0.005, "evictions": 0.005, "wasted rows": 0.01}
    missed = {name: coverage[name] for name, share in per_step.items() if coverage[name] < share * num_steps}
    assert not missed


def test_ac_24_fuzzed_steps_never_diverge() -> None:
    check_ac_24(16_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ac_24_hundred_thousand_fuzzed_steps_never_diverge() -> None:
    check_ac_24(100_000)


def test_mutant_ac_24_what_was_not_computed_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a preempted prompt stay matchable though nothing was written to them."""
    monkeypatch.setattr(KVCache, "withdraw", lambda kv, request, start: None)
    with pytest.raises(AssertionError):
        check_ac_24(16_000)


def test_mutant_ac_24_evicted_blocks_keep_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(pool: BlockPool) -> int:
        block, _ = pool._cached.popitem(last=False)
        pool.num_evicted += 1
        return block

    monkeypatch.setattr(BlockPool, "_evict", evict)
    with pytest.raises(AssertionError):
        check_ac_24(16_000)
