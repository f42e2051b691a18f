"""The kernel sets that are plain PyTorch: the quick one, and the one that computes row by row, whose rows cannot depend
on each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from everystop.runner.torch import plain_kernels
from everystop.runner.torch.batch import AttentionBatch, SamplingBatch
from everystop.runner.torch.kernels import reference


class PlainKernels:
    """Each operation over all rows at once; see `KernelSet`."""

    name = "PyTorch"
    is_invariant = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ + bias [N]."""
        return F.linear(x, weight, bias)

    def linear_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight e4m3 [N, K]ᵀ · scales [N] + bias [N], by the quantised rows of x."""
        return reference.linear_fp8(x, weight, scales, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""
        return plain_kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm of the sum, the sum)."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up."""
        return plain_kernels.silu_mul(gate_up)

    def rope_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate query in place; write the key, normed and rotated, and the value."""
        if query_norm is not None and key_norm is not None:
            query.copy_(self.rms_norm(query, query_norm, eps))
            key = self.rms_norm(key, key_norm, eps)
        plain_kernels.rope_write(query, key, value, positions, slots, cos_sin, key_cache, value_cache)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over the paged caches."""
        return plain_kernels.paged_attention(query, key_cache, value_cache, batch, scale, window, soft_cap, out)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token for each row, or FAILED."""
        return plain_kernels.sample(logits, batch)


class RowByRowKernels(PlainKernels):
    """The same with one call a row, so that the shapes, and with them the order of every sum, are those that the row
    has alone.
    """

    name = "PyTorch, row by row"
    is_invariant = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ + bias [N]."""
        return _joined([F.linear(row, weight, bias) for row in _rows(x)], (weight.shape[0],), x)

    def linear_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight e4m3 [N, K]ᵀ · scales [N] + bias [N], by the quantised rows of x."""
        rows = [reference.linear_fp8(row, weight, scales, bias) for row in _rows(x)]
        return _joined(rows, (weight.shape[0],), x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""
        return _joined([plain_kernels.rms_norm(row, weight, eps) for row in _rows(x)], x.shape[1:], x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up."""
        size = gate_up.shape[-1] // 2
        return _joined([plain_kernels.silu_mul(row) for row in _rows(gate_up)], (size,), gate_up)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over the paged caches."""
        starts, ends = batch.query_starts.tolist(), batch.context_lens.tolist()
        attended = []
        for s, end in enumerate(ends):
            table = batch.block_tables[s : s + 1]
            keys, values = (plain_kernels.gather(cache, table, end) for cache in (key_cache, value_cache))
            for r in range(starts[s], starts[s + 1]):
                last = end - starts[s + 1] + r + 1
                first = 0 if window is None else max(0, last - window)
                row, seen = query[None, r : r + 1].clone(), slice(first, last)
                part = plain_kernels.attend(row, keys[:, seen], values[:, seen], None, scale, soft_cap)
                attended.append(part[0])
        joined = _joined(attended, query.shape[1:], query)
        return joined if out is None else out.copy_(joined)


def _rows(x: Tensor) -> Iterator[Tensor]:
    """Each row [1, …], copied: what a library does may depend on where in memory a vector begins."""
    return (x[i : i + 1].clone() for i in range(x.shape[0]))


def _joined(rows: list[Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.cat(rows) if rows else like.new_empty(0, *shape)
