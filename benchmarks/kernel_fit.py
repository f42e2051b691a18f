"""Fits the constants of a `Gpu` to measured times of single kernels, by the median of the relative errors' sizes.

The search walks along one constant at a time in ever smaller steps, so it needs nothing but numpy and gives the same
constants each time. What is minimised is the mean of |log(predicted / measured)|, to which a kernel ten times too slow
is no more than ten times one that is off by a quarter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everystop.sim.gpus import BF16_BYTES, Gpu
from everystop.sim.roofline import MIDDLE_TOKENS, NS_PER_S

Array = NDArray[np.float64]
FIRST_STEP, LAST_STEP = 0.3, 0.002


class Products(NamedTuple):
    """Measured products [m, k] × [k, n] in bf16; one entry each, times in nanoseconds."""

    m: Array
    n: Array
    k: Array
    ns: Array


class Decodes(NamedTuple):
    """Measured attention of rows of one token: K and V bytes that all of them read, and KV heads times rows."""

    num_bytes: Array
    num_heads: Array
    ns: Array


class Prefills(NamedTuple):
    """Measured attention of whole prompts: pairs of tokens and tokens, of all prompts together, and query features."""

    pairs: Array
    num_tokens: Array
    q_size: Array
    ns: Array


class Errors(NamedTuple):
    """Sizes of relative errors: median and 90th percentile; and of how many points."""

    median: float
    p90: float
    num_points: int

    def __str__(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%} of {self.num_points:,} points"


def errors_of(predicted: Array, measured: Array) -> Errors:
    """How far predictions are off."""
    off = np.abs(predicted / measured - 1)
    return Errors(round(float(np.median(off)), 4), round(float(np.quantile(off, 0.9)), 4), len(off))


def fit_products(gpu: Gpu, data: Products) -> tuple[Gpu, Errors]:
    """The same GPU with the `gemm_*` constants that suit these products."""

    def predict(constants: Array) -> Array:
        floor_ns, memory_share, compute_share, middle_factor = constants
        num_values = data.m * data.k + data.k * data.n + data.m * data.n
        memory = BF16_BYTES * num_values / (gpu.bytes_per_s * memory_share)
        arithmetic = 2 * data.m * data.n * data.k / (gpu.flops_per_s * compute_share)
        seconds = (memory**3 + arithmetic**3) ** (1 / 3)
        is_middle = (data.m >= MIDDLE_TOKENS.start) & (data.m < MIDDLE_TOKENS.stop)
        return floor_ns + NS_PER_S * np.where(is_middle, middle_factor, 1.0) * seconds

    found, errors = search(predict, np.array([3000.0, 0.8, 0.8, 1.2]), data.ns)
    floor_ns, memory_share, compute_share, middle_factor = found
    return replace(
        gpu,
        gemm_floor_ns=floor_ns,
        gemm_memory_share=memory_share,
        gemm_compute_share=compute_share,
        gemm_middle_factor=middle_factor,
        gemm_error=errors.median,
    ), errors


def fit_decodes(gpu: Gpu, data: Decodes) -> tuple[Gpu, Errors]:
    """The same GPU with the `decode_*` constants that suit these."""

    def predict(constants: Array) -> Array:
        floor_ns, memory_share, head_ns = constants
        memory_ns = NS_PER_S * data.num_bytes / (gpu.bytes_per_s * memory_share)
        return np.asarray(floor_ns + np.hypot(memory_ns, head_ns * data.num_heads))

    (floor_ns, memory_share, head_ns), errors = search(predict, np.array([10_000.0, 0.8, 20.0]), data.ns)
    found = replace(gpu, decode_floor_ns=floor_ns, decode_memory_share=memory_share, decode_head_ns=head_ns)
    return replace(found, decode_error=errors.median), errors


def fit_prefills(gpu: Gpu, data: Prefills) -> tuple[Gpu, Errors]:
    """The same GPU with the `prefill_*` constants that suit these."""

    def predict(constants: Array) -> Array:
        floor_ns, compute_share, half_tokens = constants
        flops = 4 * data.q_size * (data.pairs + half_tokens * data.num_tokens)
        return floor_ns + NS_PER_S * flops / (gpu.flops_per_s * compute_share)

    (floor_ns, compute_share, half_tokens), errors = search(predict, np.array([10_000.0, 0.6, 500.0]), data.ns)
    return replace(
        gpu,
        prefill_floor_ns=floor_ns,
        prefill_compute_share=compute_share,
        prefill_half_tokens=half_tokens,
        prefill_error=errors.median,
    ), errors


def fit_mixed(gpu: Gpu, prompt_ns: Array, decode_ns: Array, measured: Array) -> tuple[Gpu, Errors]:
    """The same GPU with the `mixed_decode_factor` that suits steps of a prompt and decodes, each of which would take so
    long alone.
    """
    (factor,), errors = search(lambda constants: prompt_ns + constants[0] * decode_ns, np.array([1.5]), measured)
    return replace(gpu, mixed_decode_factor=factor), errors


def search(predict: Callable[[Array], Array], start: Array, measured: Array) -> tuple[list[float], Errors]:
    """The constants, rounded to four digits, for which `predict` is nearest to what was measured."""
    constants, step = start, FIRST_STEP
    logs = np.log(measured)

    def loss(candidate: Array) -> float:
        return float(np.abs(np.log(predict(candidate)) - logs).mean())

    best = loss(constants)
    while step > LAST_STEP:
        improved = False
        for i in range(len(constants)):
            for factor in (1 + step, 1 / (1 + step)):
                candidate = constants.copy()
                candidate[i] *= factor
                if (value := loss(candidate)) < best:
                    constants, best, improved = candidate, value, True
        if not improved:
            step /= 2
    rounded = [float(f"{value:.4g}") for value in constants]
    return rounded, errors_of(predict(np.array(rounded)), measured)
