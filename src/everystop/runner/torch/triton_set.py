"""The kernel sets for a GPU: own Triton kernels, with the library's matrix products or, deterministic, our own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from everystop.runner.torch.batch import AttentionBatch, SamplingBatch
from everystop.runner.torch.kernels import activation, attention, fp8, norm, rope, sampling
from everystop.runner.torch.kernels import linear as projection


class TritonKernels:
    """See `KernelSet`."""

    name = "Triton"
    is_invariant = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """By cuBLAS, which chooses an algorithm by the number of rows."""
        return F.linear(x, weight, bias)

    def linear_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight e4m3 [N, K]ᵀ · scales [N] + bias [N], by the quantised rows of x, K in order."""
        return fp8.linear_fp8(x, weight, scales, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm of the sum, the sum)."""
        return norm.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up."""
        return activation.silu_mul(gate_up)

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
        rope.rope_write(
            query,
            key,
            value,
            positions,
            slots,
            cos_sin,
            key_cache,
            value_cache,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
        )

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
        return attention.paged_attention(
            query, key_cache, value_cache, batch, scale, window, soft_cap, out, deterministic=self.is_invariant
        )

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token for each row, or FAILED."""
        return sampling.sample(logits, batch)


class DeterministicTritonKernels(TritonKernels):
    """The same with matrix products whose sums have one order, whatever else is in the step."""

    name = "deterministic Triton"
    is_invariant = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ + bias [N], summed over K in order."""
        return projection.linear(x, weight, bias)
