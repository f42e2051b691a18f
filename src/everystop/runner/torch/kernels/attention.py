"""Paged attention: prefill, decode and mixed steps in one kernel; decode also split over segments of the context.

Keys are walked in segments of `SEGMENT` positions counted from the sequence's first. A segment is a softmax of its own;
segments are merged in their order. Whether one program merges them as it goes, or many compute one each and a second
kernel merges them, the arithmetic of a row is the same, and depends on nothing but the row's own sequence.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from everystop.runner.torch.batch import AttentionBatch

SEGMENT = 256
_NO_WINDOW = 1 << 30


@triton.jit
def _sequence_of(query_starts_ptr, num_seqs, query_block, BLOCK_Q: tl.constexpr):
    """The sequence that a block of query rows belongs to.

    Sequence i begins with block `query_starts[i] // BLOCK_Q + i`: an upper bound on the blocks before it that needs no
    sum over the others. Example, BLOCK_Q 16, query_starts [0, 1, 40, 41]: sequences begin at blocks 0, 1, 4.
    """
    low = query_block * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _merge(top, mass, total, other_top, other_mass, other_total):
    """Two softmaxes [M], [M], [M, D] over neighbouring keys as one; an empty one (top -inf) changes no bit."""
    new_top = tl.maximum(top, other_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - safe)
    take = tl.exp2(other_top - safe)
    mass = tl.fma(mass, keep, other_mass * take)
    total = tl.fma(total, keep[:, None], other_total * take[:, None])
    return new_top, mass, total


@triton.jit(do_not_specialize=["window", "num_seqs", "num_splits", "max_segments", "table_stride"])
def _attention(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_ptr,
    out_ptr,  # as query; not written where SPLIT
    part_ptr,  # float32 [num_tokens, num_heads, max_segments, HEAD_DIM], where SPLIT
    state_ptr,  # float32 [num_tokens, num_heads, max_segments, 2]: top and mass of each part
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    scale,  # times log2(e); with a cap divided by it instead
    cap,  # times log2(e)
    window,
    num_seqs,
    num_splits,
    max_segments,
    num_heads,
    table_stride,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One KV head and a block of query rows: row r is query token r // GROUP with head r % GROUP of the group."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts first
    kv_head = tl.program_id(1)
    if ONE_QUERY:
        seq = query_block
        first_query = query_block * 0
    else:
        seq = _sequence_of(query_starts_ptr, num_seqs, query_block, BLOCK_Q)
        first_query = (query_block - tl.load(query_starts_ptr + seq) // BLOCK_Q - seq) * BLOCK_Q
    query_begin = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_begin
    if first_query >= query_len:
        return
    num_before = tl.load(context_lens_ptr + seq) - query_len  # the position of this step's first token

    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (query < query_len)
    position = num_before + query
    token = (query_begin + query).to(tl.int64)
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_DIM
    query_at = token * query_token_stride + head * query_head_stride
    q = tl.load(query_ptr + query_at[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)

    num_keys = num_before + tl.minimum(first_query + BLOCK_Q, query_len)
    first_key = tl.maximum(num_before + first_query - window + 1, 0)
    num_segments = tl.cdiv(num_keys, SEGMENT)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    for segment in range(first_key // SEGMENT + tl.program_id(2), num_segments, num_splits):
        part_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        part_mass = tl.zeros([BLOCK_M], tl.float32)
        part = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
        begin = tl.maximum(segment * SEGMENT, first_key // TILE * TILE)
        end = tl.minimum(segment * SEGMENT + SEGMENT, num_keys)
        for tile in range(begin, end, TILE):
            keys = tile + tl.arange(0, TILE)
            is_key = keys < num_keys
            block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            key_at = block * key_block_stride + keys % BLOCK_SIZE * key_slot_stride + kv_head * key_head_stride
            k = tl.load(key_ptr + key_at[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
            score = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_CAP:  # cap · tanh(score), the exponent bounded where tanh is 1 anyway
                score = cap - 2.0 * cap / (tl.exp(tl.minimum(2.0 * score, 80.0)) + 1.0)
            seen = (keys[None, :] <= position[:, None]) & (position[:, None] - keys[None, :] < window)
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(part_top, tl.max(score, axis=1))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - safe[:, None])
            keep = tl.exp2(part_top - safe)
            part_mass = tl.fma(part_mass, keep, tl.sum(weight, axis=1))
            part_top = new_top
            value_at = block * value_block_stride + keys % BLOCK_SIZE * value_slot_stride + kv_head * value_head_stride
            v = tl.load(
                value_ptr + value_at[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
            )
            part = tl.dot(weight.to(v.dtype), v, part * keep[:, None], input_precision="ieee")
        if SPLIT:
            state_at = (token * num_heads + head) * max_segments + segment
            part_at = state_at[:, None] * HEAD_DIM + dims[None, :]
            tl.store(part_ptr + part_at, part, mask=is_row[:, None] & is_dim[None, :])
            tl.store(state_ptr + state_at * 2, part_top, mask=is_row)
            tl.store(state_ptr + state_at * 2 + 1, part_mass, mask=is_row)
        else:
            top, mass, total = _merge(top, mass, total, part_top, part_mass, part)
    if not SPLIT:
        result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
        out_at = (token * out_token_stride + head * out_head_stride)[:, None] + dims[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["window", "max_segments"])
def _combine(
    part_ptr,
    state_ptr,
    out_ptr,
    context_lens_ptr,
    window,
    max_segments,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Merges the parts of one query head of a sequence's only query, in their order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_keys = tl.load(context_lens_ptr + token)
    first_key = tl.maximum(num_keys - window, 0)
    dims = tl.arange(0, HEAD_PADDED)
    is_dim = dims < HEAD_DIM
    top = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([1, HEAD_PADDED], tl.float32)
    one = tl.arange(0, 1)
    for segment in range(first_key // SEGMENT, tl.cdiv(num_keys, SEGMENT)):
        state_at = (token * tl.num_programs(1) + head) * max_segments + segment + one
        part_at = state_at[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(part_ptr + part_at, mask=is_dim[None, :], other=0.0)
        part_top = tl.load(state_ptr + state_at * 2)
        part_mass = tl.load(state_ptr + state_at * 2 + 1)
        top, mass, total = _merge(top, mass, total, part_top, part_mass, part)
    result = total / tl.where(mass > 0.0, mass, 1.0)[:, None]
    out_at = (token * out_token_stride + head * out_head_stride + one)[:, None] + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=is_dim[None, :])


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
    split: bool | None = None,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v for query [T, H, D] over paged caches [num_blocks, block_size, K, D], causal: [T, H, D].

    Query head h reads KV head h // (H / K). With `window` a position sees itself and window - 1 before it; with
    `soft_cap` scores become soft_cap · tanh(score / soft_cap). A row of a sequence whose context is 0 gives zeros.

    Everything about the launch follows from shapes and from the batch's two upper bounds. `split` (None: where a step
    of decoders alone would leave processors idle) changes no bit. A row's bits do not depend on the other rows of a
    step of its kind; with `deterministic` not on whether the step has prompts in it either: decoders then take the
    tile shape of prompts.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    one_query = batch.max_query_len == 1
    group, head_padded = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    is_narrow = one_query and not deterministic
    block_m = max(16 if is_narrow else 64 if head_padded <= 128 else 32, triton.next_power_of_2(group))
    num_blocks = batch.num_seqs if one_query else num_tokens // (block_m // group) + batch.num_seqs
    num_splits, max_segments = 1, triton.cdiv(batch.max_context_len, SEGMENT)
    if one_query and split is not False:
        wanted = triton.cdiv(4 * _num_processors(query.device), num_blocks * num_kv_heads)
        num_splits = max(1, min(max_segments, max(wanted, 2) if split else wanted // 2))
    is_split = num_splits > 1
    part, state = _scratch(query, max_segments) if is_split else (out, out)
    log2_e = 1.4426950408889634
    _attention[num_blocks, num_kv_heads, num_splits](
        query,
        key_cache,
        value_cache,
        out,
        part,
        state,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        scale / soft_cap if soft_cap else scale * log2_e,
        soft_cap * log2_e if soft_cap else 0.0,
        window or _NO_WINDOW,
        batch.num_seqs,
        num_splits,
        max_segments,
        num_heads,
        batch.block_tables.stride(0),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        HEAD_DIM=head_dim,
        HEAD_PADDED=head_padded,
        GROUP=group,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        TILE=_tile(query.dtype, head_padded),
        SEGMENT=SEGMENT,
        HAS_CAP=soft_cap is not None,
        ONE_QUERY=one_query,
        SPLIT=is_split,
        # What registers hold without spilling, on every capability (docs/gpu-kernels.md).
        num_warps=4 if is_narrow else 8,
        num_stages=2,
        # Three blocks a multiprocessor, or one: left to itself, ptxas spills to have one more.
        maxnreg=168 if is_narrow and head_padded <= 128 else 248,
    )
    if is_split:
        _combine[num_tokens, num_heads](
            part,
            state,
            out,
            batch.context_lens,
            window or _NO_WINDOW,
            max_segments,
            *out.stride()[:2],
            HEAD_DIM=head_dim,
            HEAD_PADDED=head_padded,
            SEGMENT=SEGMENT,
            num_warps=1,
        )
    return out


def _scratch(query: torch.Tensor, max_segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts of all rows, and their tops and masses."""
    num_tokens, num_heads, head_dim = query.shape
    shape = (num_tokens, num_heads, max_segments)
    part = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    return part, torch.empty((*shape, 2), dtype=torch.float32, device=query.device)


def _tile(dtype: torch.dtype, head_padded: int) -> int:
    """Keys a tile: what shared memory and registers hold; a function of the model alone, so bits never depend on it."""
    return 64 if head_padded <= 64 and dtype.itemsize == 2 else 32


@cache
def _num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; of an H200 where there is none, as in the interpreter."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
