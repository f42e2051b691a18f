"""Kernels in plain PyTorch: what the decoder means by each operation; right anywhere, quick nowhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from everystop.runner.torch.batch import FAILED, GREEDY_TEMPERATURE, AttentionBatch, SamplingBatch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of [T, 2F]: [T, F]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the heads of x [T, H, D] by the angles whose cosines and sines are cos_sin [T, D]."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> None:
    """Rotate query in place; write the rotated key, and the value, to their slots."""
    turns = cos_sin[positions]
    query.copy_(rotate(query, turns))
    key_cache.flatten(0, 1).index_copy_(0, slots, rotate(key, turns).to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of query [T, H, D] over the paged caches, by definition, in float32."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    if batch.max_query_len == 1:
        keys, values = (gather(cache, batch.block_tables, batch.max_context_len) for cache in (key_cache, value_cache))
        seen = visible(batch.context_lens[:, None], keys.shape[1], window)
        out.copy_(attend(query[:, None], keys, values, seen, scale, soft_cap)[:, 0])
        return out
    starts = batch.query_starts.tolist()
    for s, context_len in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        table = batch.block_tables[s : s + 1]
        keys, values = (gather(cache, table, context_len) for cache in (key_cache, value_cache))
        ends = torch.arange(context_len - rows.stop + rows.start + 1, context_len + 1, device=query.device)[None]
        seen = visible(ends, context_len, window)
        out[rows] = attend(query[None, rows], keys, values, seen, scale, soft_cap)[0]
    return out


def gather(cache: Tensor, tables: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` positions of each sequence: float32 [S, num_tokens, K, D]."""
    num_blocks = -(-num_tokens // cache.shape[1])
    return cache[tables[:, :num_blocks].long()].flatten(1, 2)[:, :num_tokens].float()


def visible(ends: Tensor, num_tokens: int, window: int | None) -> Tensor:
    """Which of `num_tokens` positions are below each row's end, and, with a window, among the last so many of those:
    bool [S, Q, num_tokens] of ends [S, Q].
    """
    positions = torch.arange(num_tokens, device=ends.device)
    seen = positions < ends[..., None]
    return seen if window is None else seen & (positions >= ends[..., None] - window)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float, soft_cap: float | None
) -> Tensor:
    """Attention of query [S, Q, H, D] over keys and values [S, C, K, D], in float32; `seen` None sees all."""
    num_seqs, num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    grouped = query.float().reshape(num_seqs, num_rows, num_kv_heads, -1, head_dim)
    grouped = grouped.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [S, K, Q · G, D]
    scores = grouped @ keys.permute(0, 2, 3, 1) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if seen is not None:
        by_row = scores.view(num_seqs, num_kv_heads, num_rows, -1, scores.shape[-1])
        scores = by_row.masked_fill(~seen[:, None, :, None], float("-inf")).flatten(2, 3)
        # What is not seen may hold anything, even no number.
        values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)
    attended = scores.softmax(-1) @ values.permute(0, 2, 1, 3)
    attended = attended.view(num_seqs, num_kv_heads, num_rows, -1, head_dim).permute(0, 2, 1, 3, 4)
    return attended.reshape(num_seqs, num_rows, num_heads, head_dim).to(query.dtype)


# ------------------------------------------------------------------------------------ sampling


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token for each row of logits float32 [R, V], or FAILED: int64 [R]."""
    is_sound = logits.isfinite().all(-1)
    x = changed_logits(logits, batch)
    best = x.amax(-1, keepdim=True)
    is_sound &= best[:, 0].isfinite()
    greedy = x.argmax(-1)  # of equals the first
    if batch.is_greedy:
        return torch.where(is_sound, greedy, FAILED)
    is_greedy = batch.temperatures < GREEDY_TEMPERATURE
    temperatures = torch.where(is_greedy, 1.0, batch.temperatures)[:, None].double()
    weights = ((x.double() - best) / temperatures).exp()
    if batch.has_cuts:
        weights = cut(x, weights, batch)
    sums = weights.cumsum(-1)
    targets = uniform(batch.seeds, batch.choices, batch.positions)[:, None] * sums[:, -1:]
    # The first token at which the sum passes the target; it never is one without weight.
    drawn = (sums <= targets).sum(-1)
    last = sums.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    chosen = torch.where(is_greedy, greedy, torch.minimum(drawn, last))
    return torch.where(is_sound, chosen, FAILED)


def changed_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits after edits, penalties and masks: a copy where anything changes."""
    x = logits
    if batch.edits is not None:
        x = x.index_put((batch.edits.rows, batch.edits.ids), batch.edits.values, accumulate=True)
    if batch.output_counts is not None and batch.is_in_prompt is not None:
        x = penalized(x, batch, batch.output_counts, batch.is_in_prompt)
    if batch.allowed is not None:
        ids = torch.arange(x.shape[-1], device=x.device)
        is_allowed = (batch.allowed[:, ids // 32] >> (ids % 32).int()) & 1
        x = x.masked_fill(is_allowed == 0, float("-inf"))
    return x


def penalized(x: Tensor, batch: SamplingBatch, output_counts: Tensor, is_in_prompt: Tensor) -> Tensor:
    """Repetition (Keskar et al., 2019) over prompt and output, then presence and frequency over the output."""
    counts = output_counts[batch.seats, : x.shape[-1]]
    is_seen = is_in_prompt[batch.seats, : x.shape[-1]] | (counts > 0)
    repetition = batch.repetition_penalties[:, None]
    x = torch.where(is_seen, torch.where(x > 0, x / repetition, x * repetition), x)
    penalties = batch.frequency_penalties[:, None] * counts + batch.presence_penalties[:, None]
    return torch.where(counts > 0, x - penalties, x)


def cut(x: Tensor, weights: Tensor, batch: SamplingBatch) -> Tensor:
    """The weights of the tokens that top-k, top-p and min-p leave, 0 for the others; ties go to the lowest id.

    Top-p keeps the fewest best tokens whose share of what top-k leaves reaches it; min-p is a share of the best.
    """
    order = x.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(-1, order)
    ranks = torch.arange(x.shape[-1], device=x.device)
    top_ks = torch.where(batch.top_ks > 0, batch.top_ks, x.shape[-1])[:, None]
    ordered = ordered.masked_fill(ranks >= top_ks, 0.0)
    sums = ordered.cumsum(-1)
    targets = batch.top_ps[:, None] * sums[:, -1:]
    is_beyond = (sums - ordered >= targets) & (ranks > 0) & (batch.top_ps[:, None] < 1.0)
    ordered = ordered.masked_fill(is_beyond | (ordered < batch.min_ps[:, None]), 0.0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)


_MASK = 0xFFFFFFFF


def uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) with 53 random bits, by Philox4x32-10 (Salmon et al., 2011): float64 [R].

    The key is the seed; the counter is (position, choice, kind), kind 0 being the draw of a token.
    """
    key0, key1 = seeds & _MASK, seeds >> 32 & _MASK
    c0, c1 = positions & _MASK, positions >> 32 & _MASK
    c2, c3 = choices.long() & _MASK, torch.zeros_like(positions)
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # of 64 bits, whose sign means nothing
        c0, c1, c2, c3 = (b >> 32 & _MASK) ^ c1 ^ key0, b & _MASK, (a >> 32 & _MASK) ^ c3 ^ key1, a & _MASK
        key0, key1 = key0 + 0x9E3779B9 & _MASK, key1 + 0xBB67AE85 & _MASK
    return (c0 << 21 | c1 >> 11).double() * 2.0**-53
