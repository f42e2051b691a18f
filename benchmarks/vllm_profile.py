"""Step times from a measured profile of vLLM's layers: tables of kernel times that are looked up and interpolated.

The tables are those of LLMServingSim's profiler (github.com/casys-kaist/LLMServingSim at 5daddb21, MIT): `dense.csv`
(layer, tokens), `per_sequence.csv` (layer, rows that sample) and `attention.csv` (tokens of a prompt's chunk, its
tokens before, decode rows, tokens that each of them attends to), in microseconds.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from benchmarks.kernel_fit import (
    Array,
    Decodes,
    Errors,
    Prefills,
    Products,
    fit_decodes,
    fit_mixed,
    fit_prefills,
    fit_products,
)
from everystop.core.plan import StepPlan
from everystop.sim.gpus import BF16_BYTES, Gpu, ModelShape
from everystop.sim.roofline import HOST_ROW_NS, HOST_STEP_NS, decode_attention_ns

NS_PER_US = 1e3
LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
ONCE = {"embedding": 1, "final_layernorm": 1}
SAMPLED = {"lm_head": 1, "sampler": 1}
Key = tuple[int, int, int, int]


class Curve:
    """Times by one size: straight between the measured ones, and on through the last two beyond them."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self._sizes = sorted(points)
        self._times = [points[size] for size in self._sizes]

    def at(self, size: float) -> float:
        """The time at this size."""
        i = min(max(1, bisect_right(self._sizes, size)), len(self._sizes) - 1)
        left, right = self._sizes[i - 1], self._sizes[i]
        share = max(0.0, (size - left) / (right - left))
        return self._times[i - 1] + share * (self._times[i] - self._times[i - 1])


class AttentionTable:
    """Times by chunk, tokens before it, decode rows and their tokens; straight along each between the measured ones.

    A corner that was not measured is estimated from the same rows apart: those of the prompt, and those that decode.
    """

    def __init__(self, times: Mapping[Key, float]) -> None:
        self.times = times
        self._axes = [sorted({key[axis] for key in times}) for axis in range(4)]

    def at(self, chunk: float, before: float, num_rows: float, context: float) -> float:
        """The time in the units of the table; 0 rows and 0 tokens are known sizes."""
        sizes = (chunk, before if chunk else 0, num_rows, context if num_rows else 0)
        corners = [list(_neighbours(axis, size)) for axis, size in zip(self._axes, sizes, strict=True)]
        total = 0.0
        for corner in product(*corners):
            share = prod(weight for _, weight in corner)
            if share:
                total += share * self._time(*(size for size, _ in corner))
        return total

    def _time(self, chunk: int, before: int, num_rows: int, context: int) -> float:
        if not chunk and not num_rows:
            return 0.0
        key = (chunk, before if chunk else 0, num_rows, context if num_rows else 0)
        found = self.times.get(key)
        if found is not None:
            return found
        if chunk and num_rows:
            return self._time(chunk, before, 0, 0) + self._time(0, 0, num_rows, context or self._axes[3][1])
        smaller = (chunk, before, num_rows, context or self._axes[3][1])
        if smaller != key and smaller in self.times:
            return self.times[smaller]
        raise KeyError(key)


def _neighbours(axis: Sequence[int], size: float) -> Iterator[tuple[int, float]]:
    """The measured sizes around this one and their weights; beyond the last the nearest two are drawn on."""
    i = min(max(1, bisect_right(axis, size)), len(axis) - 1)
    left, right = axis[i - 1], axis[i]
    share = (size - left) / (right - left)
    yield left, 1 - share
    yield right, share


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """The step times of one model on one GPU from its profile; satisfies `everystop.sim.cost.StepCost`."""

    layer: Curve
    once: Curve
    sampled: Curve
    attention: AttentionTable
    num_layers: int
    source: str = "a profile of its layers"
    request_ns: float = 0.0

    @classmethod
    def read(cls, folder: Path, shape: ModelShape) -> LayerProfile:
        """The three tables of a folder."""
        dense, per_row = _curves(folder / "dense.csv"), _curves(folder / "per_sequence.csv")
        return cls(
            layer=_sum(dense, LAYER),
            once=_sum(dense, ONCE),
            sampled=_sum(per_row, SAMPLED),
            attention=AttentionTable(_attention_times(folder / "attention.csv")),
            num_layers=shape.num_layers,
        )

    def plan_ns(self, plan: StepPlan) -> int:
        """The longer of the GPU's time and the host's. All prompts but the longest chunk have kernels of their own."""
        if not plan.rows:
            return 0
        starts, nums_tokens = plan.rows.starts, plan.rows.nums_tokens
        num_tokens = sum(nums_tokens)
        num_samples = sum(offset < n for offset, n in zip(plan.rows.logits_from, nums_tokens, strict=True))
        contexts = [start + 1 for start, n in zip(starts, nums_tokens, strict=True) if n == 1]
        chunks = sorted((n, start) for start, n in zip(starts, nums_tokens, strict=True) if n > 1)
        chunk, before = chunks.pop() if chunks else (0, 0)
        context = sum(contexts) / len(contexts) if contexts else 0
        attention = self.attention.at(chunk, before, len(contexts), context)
        attention += sum(self.attention.at(n, start, 0, 0) for n, start in chunks)
        gpu_us = self.num_layers * (self.layer.at(num_tokens) + attention) + self.once.at(num_tokens)
        gpu_us += self.sampled.at(num_samples) if num_samples else 0.0
        return round(max(NS_PER_US * gpu_us, HOST_STEP_NS + HOST_ROW_NS * len(plan.rows)))


def _curves(path: Path) -> dict[str, dict[int, float]]:
    """Times by layer and size."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as file:
        for layer, size, time in list(csv.reader(file))[1:]:
            curves[layer][int(size)] = float(time)
    return curves


def _attention_times(path: Path) -> dict[Key, float]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {(int(a), int(b), int(c), int(d)): float(time) for a, b, c, d, time in rows}


def _sum(curves: Mapping[str, Mapping[int, float]], counts: Mapping[str, int]) -> Curve:
    """So many of each layer, one after the other."""
    sizes = set.intersection(*(set(curves[name]) for name in counts))
    return Curve({size: sum(num * curves[name][size] for name, num in counts.items()) for size in sorted(sizes)})


def fit_profile(folder: Path, sheet: Gpu, shape: ModelShape) -> tuple[Gpu, dict[str, Errors]]:
    """Constants fitted to the profile of a model of that shape, for models of others; `sheet` has the peaks."""
    attention = {key: NS_PER_US * time for key, time in _attention_times(folder / "attention.csv").items()}
    gpu, products = fit_products(sheet, _products(_curves(folder / "dense.csv"), shape))
    decodes = {key: ns for key, ns in attention.items() if not key[0]}
    num_bytes = [BF16_BYTES * 2 * shape.kv_size * num_rows * context for _, _, num_rows, context in decodes]
    gpu, decode_errors = fit_decodes(
        gpu,
        Decodes(_array(num_bytes), _array(shape.num_kv_heads * key[2] for key in decodes), _array(decodes.values())),
    )
    prompts = {key: ns for key, ns in attention.items() if not key[2]}
    gpu, prompt_errors = fit_prefills(
        gpu,
        Prefills(
            pairs=_array(n * before + n * (n + 1) // 2 for n, before, _, _ in prompts),
            num_tokens=_array(n for n, _, _, _ in prompts),
            q_size=_array(shape.q_size for _ in prompts),
            ns=_array(prompts.values()),
        ),
    )
    mixed = [key for key in attention if key[0] and key[2]]
    gpu, mixed_errors = fit_mixed(
        gpu,
        _array(attention[chunk, before, 0, 0] for chunk, before, _, _ in mixed),
        _array(decode_attention_ns(gpu, shape, num_rows, num_rows * context) for _, _, num_rows, context in mixed),
        _array(attention[key] for key in mixed),
    )
    return gpu, {"products": products, "decodes": decode_errors, "prompts": prompt_errors, "both": mixed_errors}


def _products(dense: Mapping[str, Mapping[int, float]], shape: ModelShape) -> Products:
    """The measured products of a layer."""
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    points = [
        (m, n, k, NS_PER_US * time)
        for name, (n, k) in zip(names, shape.layer_products, strict=True)
        for m, time in dense[name].items()
    ]
    return Products(*(_array(column) for column in zip(*points, strict=True)))


def _array(values: Iterable[float]) -> Array:
    return np.array(list(values), dtype=float)
