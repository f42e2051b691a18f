"""Rotary embedding of queries and keys, and the write of keys and values to the cache, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotated(first, second, norm_ptr, cos, sin, eps, half, is_half, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads [N, HEAD_DIM] as two halves, normed where the model does so, then turned."""
    if HAS_NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        first *= factor * tl.load(norm_ptr + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        second *= factor * tl.load(norm_ptr + HEAD_DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rope_write(
    query_ptr,  # [num_tokens, num_kv_heads · GROUP, HEAD_DIM], turned in place
    key_ptr,
    value_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    position_ptr,
    slot_ptr,
    cos_sin_ptr,  # [max_position, HEAD_DIM]: cosines, then sines
    query_norm_ptr,
    key_norm_ptr,
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache_ptr,
    eps,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_cache_block_stride,
    key_cache_slot_stride,
    key_cache_head_stride,
    value_cache_block_stride,
    value_cache_slot_stride,
    value_cache_head_stride,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One token's queries, key and value of one KV head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half = tl.arange(0, HALF_PADDED)
    is_half = half < HALF
    turn_ptr = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * HEAD_DIM + half
    cos = tl.load(turn_ptr, mask=is_half, other=0.0)[None, :]
    sin = tl.load(turn_ptr + HALF, mask=is_half, other=0.0)[None, :]

    group = tl.arange(0, GROUP_PADDED)
    heads = kv_head * GROUP + group
    is_query = (group < GROUP)[:, None] & is_half[None, :]
    at = query_ptr + token * query_token_stride + (heads * query_head_stride)[:, None] + half[None, :]
    first = tl.load(at, mask=is_query, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_query, other=0.0).to(tl.float32)
    first, second = _rotated(first, second, query_norm_ptr, cos, sin, eps, half, is_half, HEAD_DIM, HAS_NORM)
    tl.store(at, first.to(query_ptr.dtype.element_ty), mask=is_query)
    tl.store(at + HALF, second.to(query_ptr.dtype.element_ty), mask=is_query)

    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    one_head = tl.arange(0, 1)[:, None]
    at = key_ptr + token * key_token_stride + kv_head * key_head_stride + one_head + half[None, :]
    first = tl.load(at, mask=is_half[None, :], other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_half[None, :], other=0.0).to(tl.float32)
    first, second = _rotated(first, second, key_norm_ptr, cos, sin, eps, half, is_half, HEAD_DIM, HAS_NORM)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cell = block * key_cache_block_stride + offset * key_cache_slot_stride + kv_head * key_cache_head_stride
    at = key_cache_ptr + cell + one_head + half[None, :]
    tl.store(at, first.to(key_cache_ptr.dtype.element_ty), mask=is_half[None, :])
    tl.store(at + HALF, second.to(key_cache_ptr.dtype.element_ty), mask=is_half[None, :])

    at = value_ptr + token * value_token_stride + kv_head * value_head_stride + half
    cell = block * value_cache_block_stride + offset * value_cache_slot_stride + kv_head * value_cache_head_stride
    for part in tl.static_range(2):
        value = tl.load(at + part * HALF, mask=is_half)
        to = value_cache_ptr + cell + part * HALF + half
        tl.store(to, value.to(value_cache_ptr.dtype.element_ty), mask=is_half)


def rope_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate query [T, H, D] in place, and write the rotated key and the value [T, K, D] to their slots.

    `positions` [T], `slots` int64 [T] = block · block_size + offset, below 0 for a token that is not kept; `cos_sin`
    float32 [max_position, D]: the cosines of D/2 angles, then the sines. Channel i turns with channel i + D/2. With
    `query_norm` and `key_norm` [D] each head is RMS-normed first. Caches are [num_blocks, block_size, K, D].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert key_cache.stride(3) == value_cache.stride(3) == 1
    assert cos_sin.is_contiguous()
    assert (query_norm is None) == (key_norm is None)
    group = num_heads // num_kv_heads
    _rope_write[num_tokens, num_kv_heads](
        query,
        key,
        value,
        positions,
        slots,
        cos_sin,
        query if query_norm is None else query_norm,
        query if key_norm is None else key_norm,
        key_cache,
        value_cache,
        eps,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HEAD_DIM=head_dim,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        BLOCK_SIZE=key_cache.shape[1],
        HAS_NORM=query_norm is not None,
        num_warps=2,
    )
