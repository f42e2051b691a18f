"""What each kernel computes, the slow and obvious way: row by row, in float64. The oracle of its tests."""

from __future__ import annotations

import math

import torch

from everystop.runner.torch.batch import FAILED, GREEDY_TEMPERATURE, AttentionBatch, SamplingBatch

_WORD = 0xFFFFFFFF


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of query [T, H, D] over paged caches [num_blocks, block_size, K, D], one row after the other."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    group = query.shape[1] // key_cache.shape[2]
    starts = batch.query_starts.tolist()
    for seq, context_len in enumerate(batch.context_lens.tolist()):
        for row in range(starts[seq], starts[seq + 1]):
            num_seen = context_len - starts[seq + 1] + row + 1
            if num_seen <= 0:
                continue
            table = batch.block_tables[seq]
            keys, values = (_gather(cache, table, num_seen, group) for cache in (key_cache, value_cache))
            scores = torch.einsum("hd,chd->hc", query[row].double(), keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if window is not None:
                scores[:, : max(num_seen - window, 0)] = -math.inf
            out[row] = torch.einsum("hc,chd->hd", scores.softmax(-1), values).to(out.dtype)
    return out


def _gather(cache: torch.Tensor, table: torch.Tensor, num_positions: int, group: int) -> torch.Tensor:
    """The first positions of a sequence, each KV head as often as query heads read it: float64 [C, H, D]."""
    block_size = cache.shape[1]
    cells = [cache[int(table[i // block_size]), i % block_size] for i in range(num_positions)]
    return torch.stack(cells).double().repeat_interleave(group, dim=1)


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
    """Norm and rotate query in place, write key (normed and rotated) and value to their slots, a token at a time."""
    block_size = key_cache.shape[1]
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        turn = cos_sin[position].double()
        query[token] = _rotate(_norm(query[token], query_norm, eps), turn).to(query.dtype)
        if slot >= 0:
            cell = slot // block_size, slot % block_size
            key_cache[cell] = _rotate(_norm(key[token], key_norm, eps), turn).to(key_cache.dtype)
            value_cache[cell] = value[token].to(value_cache.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, or x: float64."""
    if weight is None:
        return x.double()
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Heads [H, D] by D/2 cosines, then sines."""
    cos, sin = turn.chunk(2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""
    return _norm(x, weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm of the sum, the sum) of x and residual [T, D]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of [T, 2F]: [T, F]."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] · weight [N, K]ᵀ + bias [N]."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as e4m3 with a float32 scale a row [T]."""
    largest = x.float().abs().amax(-1)
    scales = torch.where(largest > 0, largest / 448.0, 1.0)
    return (x.float() / scales[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], its rows quantised, · weight e4m3 [N, K]ᵀ · scales [N] + bias [N]."""
    quantized, scales = quantize_rows(x)
    out = (quantized.double() @ weight.double().T) * scales.double()[:, None] * weight_scales.double()
    return (out if bias is None else out + bias.double()).to(x.dtype)


# --------------------------------------------------------------------------------------------------------- sampling


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: Philox4x32-10 (Salmon et al., 2011).

    The key is the seed, the counter (position, choice, kind), and the kind of a token's draw is 0.
    """
    key = [seed & _WORD, seed >> 32 & _WORD]
    counter = [position & _WORD, position >> 32 & _WORD, choice & _WORD, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & _WORD, a >> 32 ^ counter[3] ^ key[1], a & _WORD]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return float((counter[0] << 32 | counter[1]) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token for each row of logits [R, V], or FAILED: int64 [R]; leaves the logits as they are."""
    tokens = [_sample_row(logits[row].float(), batch, row) for row in range(logits.shape[0])]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(raw: torch.Tensor, batch: SamplingBatch, row: int) -> int:
    if not raw.isfinite().all():
        return FAILED
    x = _changed(raw.clone(), batch, row).tolist()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    best = x[order[0]]
    if not math.isfinite(best):
        return FAILED
    temperature = float(batch.temperatures[row])
    if temperature < GREEDY_TEMPERATURE:
        return order[0]
    top_k, top_p, min_p = int(batch.top_ks[row]), float(batch.top_ps[row]), float(batch.min_ps[row])
    weights = {i: math.exp((x[i] - best) / temperature) for i in order[: top_k or None]}
    if top_p < 1.0:
        weights = _best_share(weights, top_p)
    left = {i: weight for i, weight in sorted(weights.items()) if weight >= min_p}
    seed, choice, position = int(batch.seeds[row]), int(batch.choices[row]), int(batch.positions[row])
    target = uniform(seed, choice, position) * sum(left.values())
    for token, weight in left.items():
        if target < weight:
            return token
        target -= weight
    return max(token for token, weight in left.items() if weight > 0)


def _changed(x: torch.Tensor, batch: SamplingBatch, row: int) -> torch.Tensor:
    """Logits [V] after edits, penalties and mask, written over."""
    if batch.edits is not None:
        edits = zip(batch.edits.rows.tolist(), batch.edits.ids.tolist(), batch.edits.values.tolist(), strict=True)
        for edited, token, value in edits:
            if edited == row:
                x[token] += value
    if batch.output_counts is not None and batch.is_in_prompt is not None:
        seat = int(batch.seats[row])
        count = batch.output_counts[seat, : len(x)]
        is_seen = batch.is_in_prompt[seat, : len(x)] | (count > 0)
        repetition = batch.repetition_penalties[row]
        x = torch.where(is_seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = torch.where(count > 0, x - (batch.frequency_penalties[row] * count + batch.presence_penalties[row]), x)
    if batch.allowed is not None:
        words = [word & _WORD for word in batch.allowed[row].tolist()]
        is_forbidden = [words[i // 32] >> i % 32 & 1 == 0 for i in range(len(x))]
        x[torch.tensor(is_forbidden, device=x.device)] = -math.inf
    return x


def _best_share(weights: dict[int, float], share: float) -> dict[int, float]:
    """The fewest first weights that are a share of all; at least one."""
    target, reached = share * sum(weights.values()), 0.0
    kept: dict[int, float] = {}
    for token, weight in weights.items():
        if kept and reached >= target:
            break
        kept[token] = weight
        reached += weight
    return kept
