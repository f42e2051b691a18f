"""The gate of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < size
    gate = tl.load(x_ptr + row * x_stride + i, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + i, mask=is_in, other=0.0).to(tl.float32)
    decayed = tl.exp(-tl.abs(gate))  # never overflows
    silu = tl.where(gate < 0.0, gate * decayed, gate) / (1.0 + decayed)
    tl.store(out_ptr + row * size + i, (silu * up).to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of [T, 2F], gate first, in float32, rounded once: [T, F]."""
    assert gate_up.stride(1) == 1
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul[num_rows, triton.cdiv(size, block)](gate_up, out, gate_up.stride(0), size, BLOCK=block, num_warps=4)
    return out
