"""Projections in FP8 (e4m3): a scale for each output of the weight and each token of the input.

For devices of compute capability 8.9 and above; an older one has no such numbers, and Triton refuses to compile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)  # of e4m3


@triton.jit
def _rounded(x):
    """Numbers up to 448 as e4m3 has them: three bits behind the first, or multiples of 2^-9 below 2^-6; ties to even.

    A GPU's own conversion would do; the interpreter's goes wrong where rounding carries, and so finds nothing to round.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit
def _quantize(x_ptr, out_ptr, scales_ptr, x_stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    is_in = i < SIZE
    x = tl.load(x_ptr + row * x_stride + i, mask=is_in, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    scale = tl.where(largest > 0.0, largest / _LARGEST, 1.0)
    scaled = tl.minimum(tl.maximum(x / scale, -_LARGEST), _LARGEST)
    tl.store(out_ptr + row * SIZE + i, _rounded(scaled).to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_fp8(
    x_ptr,  # [num_rows, K]
    x_scales_ptr,
    weight_ptr,  # [N, K]
    weight_scales_ptr,
    bias_ptr,
    out_ptr,  # [num_rows, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile of the output; each BLOCK_K products are a sum of their own, added in float32."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = (tl.program_id(0) % num_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) // num_row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < N
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row.to(tl.int64) * K)[:, None] + depth[None, :]
    weight_at = weight_ptr + (column.to(tl.int64) * K)[None, :] + depth[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        is_depth = depth < K - begin
        x = tl.load(x_at + begin, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        weight = tl.load(weight_at + begin, mask=is_column[None, :] & is_depth[:, None], other=0.0)
        total += tl.dot(x, weight)
    x_scale = tl.load(x_scales_ptr + row, mask=is_row, other=0.0)
    weight_scale = tl.load(weight_scales_ptr + column, mask=is_column, other=0.0)
    total = total * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + (row.to(tl.int64) * N)[:, None] + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as e4m3 with a float32 scale a row [T], the row's largest number being 448 scales.

    For weights [N, K] that is a scale for each output.
    """
    assert x.stride(1) == 1
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    num_warps = min(max(padded // 512, 1), 16)
    _quantize[(num_rows,)](x, out, scales, x.stride(0), SIZE=size, PADDED=padded, num_warps=num_warps)
    return out, scales


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K] · weight e4m3 [N, K]ᵀ · scales [N] + bias [N] in the dtype of x, whose rows are quantised on the way."""
    quantized, scales = quantize_rows(x)
    (num_rows, depth), size = x.shape, weight.shape[0]
    assert weight.is_contiguous()
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block_m, block_n = 64, 128 if size >= 8192 else 64
    _linear_fp8[(triton.cdiv(num_rows, block_m) * triton.cdiv(size, block_n),)](
        quantized,
        scales,
        weight,
        weight_scales,
        x if bias is None else bias,
        out,
        num_rows,
        N=size,
        K=depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=128,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=3,
    )
    return out
