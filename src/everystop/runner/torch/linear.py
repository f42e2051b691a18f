"""Projections: a weight in the model's dtype, or one in FP8 with a scale for each output."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from everystop.runner.torch.kernel_set import KernelSet


class Linear(Protocol):
    """A projection of K inputs to N outputs."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""

    def __call__(self, kernels: KernelSet, x: Tensor) -> Tensor:
        """x [T, K] projected: [T, N], in the dtype of x."""


class PlainLinear:
    """weight [N, K] and bias [N] in the dtype of what comes in."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, kernels: KernelSet, x: Tensor) -> Tensor:
        """x [T, K] projected: [T, N]."""
        return kernels.linear(x, self.weight, self.bias)


class Fp8Linear:
    """weight [N, K] in e4m3 with a scale for each output; what comes in is quantised with a scale for each token.

    So a row's scale is its own, and does not depend on the batch.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.scales = scales
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.weight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, kernels: KernelSet, x: Tensor) -> Tensor:
        """x [T, K] projected: [T, N]."""
        return kernels.linear_fp8(x, self.weight, self.scales, self.bias)
