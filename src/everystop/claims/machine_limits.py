"""What the machine can do at most, measured, and what one step of a model asks of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from everystop import _native
from everystop.model.spec import DecoderSpec

NUM_READ_BYTES = 256 << 20  # far more than any cache between the cores and memory
NUM_READS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """int8 operations a second in registers, and bytes a second read from memory, both by all threads together.

    `operations_per_s` is 0 where this path has no dot instructions.
    """

    operations_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Operations (a multiplication and an addition are two) of the linear layers for one decoding row, and bytes of
    weights that a step reads, however many rows it has.
    """

    operations_per_row: float
    bytes_per_step: float


def measure_limits(num_threads: int) -> MachineLimits:
    """The best of several tries each, in about a second."""
    return MachineLimits(
        operations_per_s=float(_native.measure_peak(num_threads)), bytes_per_s=read_bandwidth(num_threads)
    )


def read_bandwidth(num_threads: int, num_bytes: int = NUM_READ_BYTES) -> float:
    """Bytes a second at which so many threads read an array together: the best of 24 passes."""
    parts = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), num_threads)
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_READS):
            began_s = time.perf_counter()
            list(pool.map(np.max, parts))
            best_s = min(best_s, time.perf_counter() - began_s)
    return num_bytes / best_s


def model_work(spec: DecoderSpec, bytes_per_step: int) -> ModelWork:
    """Attention is left out: it grows with the context, and is small where contexts are short."""
    layer = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    num_weights = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    return ModelWork(operations_per_row=2.0 * num_weights, bytes_per_step=float(bytes_per_step))
