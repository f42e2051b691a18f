"""What the decoder asks of kernels, and the sets there are: plain PyTorch, the same row by row, and Triton."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from everystop.runner.torch.batch import AttentionBatch, SamplingBatch


class KernelSet(Protocol):
    """Operations on the tensors of T packed rows; none of them reads a number back to the host."""

    @property
    def name(self) -> str:
        """What is shown to the user."""

    @property
    def is_invariant(self) -> bool:
        """A row's result does not depend on the other rows of its step, to the bit."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight [N, K]ᵀ + bias [N], in the dtype of x."""

    def linear_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] · weight e4m3 [N, K]ᵀ · scales [N] + bias [N], in the dtype of x, whose rows are quantised."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, sums in float32 (arXiv 1910.07467)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm of the sum, the sum) of x and residual [T, D]; may write over both."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [T, 2F], gate first: [T, F]."""

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
        """Rotate query [T, H, D] in place, and write the rotated key and the value [T, K, D] to their slots.

        With `query_norm` and `key_norm` [D] each head is RMS-normed first. `positions` [T], `slots` int64 [T] =
        block · block_size + offset, `cos_sin` float32 [max_position, D]: the cosines of D/2 angles, then the sines.
        Channel i turns with channel i + D/2. Caches are [num_blocks, block_size, K, D].
        """

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
        """softmax(scale · q kᵀ) v for query [T, H, D] over the paged caches, causal: [T, H, D].

        Query head h reads KV head h // (H / K). With `window` a position sees itself and window - 1 before it; with
        `soft_cap` scores become soft_cap · tanh(score / soft_cap).
        """

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token for each row of logits float32 [R, vocab], or FAILED: int64 [R]; logits may be written over."""
