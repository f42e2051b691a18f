"""What the machine can do at most, measured where a configuration computes: on the CPU, or by PyTorch on its device."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from everystop import _native
from everystop.assembly import num_threads
from everystop.backend import CPU, choose_backend
from everystop.config import Config

NUM_READ_BYTES = 256 << 20  # far more than any cache between the cores and memory
NUM_READS = 24
PRODUCT_SHAPE = (512, 1024, 1024)  # rows, outputs, inputs
NUM_PRODUCTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Operations a second, and bytes a second between memory and what computes; in words what these are, with their
    units, and how they were measured. `operations_per_s` is 0 where this path has no dot instructions.
    """

    operations_per_s: float
    bytes_per_s: float
    operations: str
    bytes: str
    how: str

    def describe(self) -> str:
        """Both, in words."""
        return (
            f"{self.operations_per_s / 1e9:,.0f} {self.operations} and {self.bytes_per_s / 1e9:,.1f} {self.bytes}, "
            f"{self.how}"
        )


def measure_limits(config: Config) -> MachineLimits:
    """Of the device that `config` computes on, in its dtype, in about a second; raises ConfigError."""
    backend = choose_backend(config)
    if backend.device != CPU:
        from everystop.trial.gpu.device_limits import measure_device

        return MachineLimits(**measure_device(backend.device, backend.dtype, num_threads(config)))
    return cpu_limits(backend.dtype, num_threads(config))


def cpu_limits(dtype: str, num_threads: int) -> MachineLimits:
    """The native kernels' own: int8 dot products in registers, or the product of float32 matrices."""
    if dtype == "float32":
        operations = "float32 GFLOP/s in the kernels' own product of large matrices"
        rate = product_rate(num_threads, PRODUCT_SHAPE)
    else:
        operations, rate = "int8 GOP/s in registers", float(_native.measure_peak(num_threads))
    return MachineLimits(
        operations_per_s=rate,
        bytes_per_s=read_bandwidth(num_threads, NUM_READ_BYTES),
        operations=operations,
        bytes="GB/s read from memory",
        how="each the best of several tries with all threads",
    )


def product_rate(num_threads: int, shape: tuple[int, int, int]) -> float:
    """Operations a second of float32 matrices' product: the best of 24."""
    m, n, k = shape
    packed = _native.pack_linear("float32", np.ones((n, k), np.float32), num_threads)
    best_ns = min(_native.measure_linear("float32", [(packed, n, k, m)], num_threads, NUM_PRODUCTS))
    return 2e9 * m * n * k / float(best_ns)


def read_bandwidth(num_threads: int, num_bytes: int) -> float:
    """Bytes a second at which so many threads read an array together: the best of 24 passes."""
    parts = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), num_threads)
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_READS):
            began_s = time.perf_counter()
            list(pool.map(np.max, parts))
            best_s = min(best_s, time.perf_counter() - began_s)
    return num_bytes / best_s
