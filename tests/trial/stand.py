"""Engines over the hash model for trials, and small workloads for them."""

from __future__ import annotations

from tests.core.harness import make_policy
from tests.core.hash_model import HashModelRunner

from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.scheduler import Scheduler
from everystop.engine.engine import Engine
from everystop.sim.workloads import Job, Workload
from everystop.trial.bench import LentRunner

NUM_BLOCKS, BLOCK_SIZE = 256, 16


def make_engine(
    runner: HashModelRunner,
    policy: str = "continuous",
    *,
    max_num_seqs: int = 4,
    batch_wait_ms: int = 20,
    num_blocks: int = NUM_BLOCKS,
) -> Engine:
    """A new engine that borrows the runner."""
    limits = Limits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_num_prefill_tokens=None, max_model_len=512
    )
    kv = KVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(limits, kv, make_policy(policy, batch_wait_ms * 1_000_000))
    return Engine(scheduler, LentRunner(runner), eos_token_ids=())


def make_runner() -> HashModelRunner:
    """A model that outlives engines."""
    return HashModelRunner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def stragglers(num_batches: int = 2, size: int = 4, long: int = 30, short: int = 5) -> Workload:
    """All at once; the first of each batch is long."""
    jobs = (
        Job(
            prompt=tuple(range(100 * i, 100 * i + 10)),
            max_tokens=short if i % size else long,
            group="short" if i % size else "long",
        )
        for i in range(num_batches * size)
    )
    return Workload("stragglers", num_batches * size, tuple(jobs))
