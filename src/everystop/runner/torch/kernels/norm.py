"""RMSNorm (arXiv 1910.07467), alone or of a sum that goes on as the residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One row; the sum of squares is a tree over the row, the same for any number of rows."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    is_in = i < SIZE
    x = tl.load(x_ptr + row * x_stride + i, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + i, mask=is_in, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + i, rounded, mask=is_in)
        x = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + i, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + i, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=is_in)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension of x [..., D], in float32, rounded once."""
    size = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, rows, weight, out, out, eps, has_residual=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm of the sum, the sum) of x and residual [T, D]; what is normed is the sum as rounded to their dtype."""
    assert x.stride(1) == residual.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps, has_residual=True)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    has_residual: bool,
) -> None:
    num_rows, size = x.shape
    padded = triton.next_power_of_2(size)
    _rms_norm[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        eps,
        x.stride(0),
        residual.stride(0),
        SIZE=size,
        PADDED=padded,
        HAS_RESIDUAL=has_residual,
        num_warps=min(max(padded // 512, 1), 16),
    )
