"""Projections: a weight in the model's dtype, or one in FP8 with a scale for each output."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from everystop.runner.torch.kernel_set import KernelSet

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


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
        values, scales = to_fp8(x)
        if x.is_cuda:
            return torch._scaled_mm(
                values, self.weight.t(), scale_a=scales, scale_b=self.scales.t(), bias=self.bias, out_dtype=x.dtype
            )
        exact = (values.float() @ self.weight.float().t()) * scales * self.scales.t()
        return (exact if self.bias is None else exact + self.bias.float()).to(x.dtype)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of x [R, K] in e4m3, and the float32 scale [R, 1] that gives each back."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales
