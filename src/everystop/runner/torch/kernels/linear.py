"""A projection whose sums have one order: a row's bits do not depend on how many rows there are.

A library picks the shape of its tiles, and splits K, by the number of rows; here both follow from the weight alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,  # [num_rows, K]
    weight_ptr,  # [N, K]
    bias_ptr,
    out_ptr,  # [num_rows, N]
    num_rows,
    x_stride,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile of the output; programs that share a tile of the weight are neighbours."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = (tl.program_id(0) % num_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) // num_row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < N
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (row.to(tl.int64) * x_stride)[:, None] + depth[None, :]
    weight_at = weight_ptr + (column.to(tl.int64) * weight_stride)[None, :] + depth[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, K, BLOCK_K):
        is_depth = depth < K - begin
        x = tl.load(x_at + begin, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        weight = tl.load(weight_at + begin, mask=is_column[None, :] & is_depth[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + (row.to(tl.int64) * N)[:, None] + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] · weight [N, K]ᵀ + bias [N], summed in float32 from the first of K to the last, in the dtype of x."""
    (num_rows, depth), size = x.shape, weight.shape[0]
    assert x.stride(1) == weight.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    is_wide = x.dtype.itemsize == 4
    block_m, block_n = (32, 32) if is_wide else (64, 128 if size >= 8192 else 64)
    _linear[(triton.cdiv(num_rows, block_m) * triton.cdiv(size, block_n),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_rows,
        x.stride(0),
        weight.stride(0),
        N=size,
        K=depth,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=32 if is_wide else 64,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=3,
    )
    return out
