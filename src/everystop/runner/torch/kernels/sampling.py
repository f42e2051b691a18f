"""Sampling: one token a row of logits, by the rules of the native runner (`csrc/sampling.hpp`) and its random numbers.

Four kernels. `_survey` looks at each tile of each row; `cuts.cut` finds the last token that top-k and top-p leave;
`_weigh` sums what is left of each tile; `_draw` picks a tile, and in it a token. What a row gives depends on nothing
but the row and its settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from everystop.runner.torch.batch import FAILED, SamplingBatch
from everystop.runner.torch.kernels.cuts import GREEDY, MAX_CHUNK, cut, keeps, key_of

TILE = 1024
_FAILED = tl.constexpr(FAILED)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def uniform(seed, choice, position):
    """A number in [0, 1) with 53 random bits: Philox4x32-10, key the seed, counter (position, choice, kind 0)."""
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2 = choice.to(tl.uint32)
    c3 = c2 ^ c2
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = a.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    bits = ((c0.to(tl.uint64) << 32) | c1.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _edit(logits_ptr, rows_ptr, ids_ptr, values_ptr, num_edits, row_stride, BLOCK: tl.constexpr):
    """Adds to single logits; atomic, for a token may be biased and forbidden both."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_edit = i < num_edits
    row = tl.load(rows_ptr + i, mask=is_edit, other=0)
    token = tl.load(ids_ptr + i, mask=is_edit, other=0)
    tl.atomic_add(logits_ptr + row * row_stride + token, tl.load(values_ptr + i, mask=is_edit, other=0.0), mask=is_edit)


@triton.jit(do_not_specialize=["num_tiles"])
def _survey(
    logits_ptr,  # float32 [R, V]; written over where there are penalties or a mask
    tops_ptr,  # float32 [R, num_tiles]: the largest logit of each tile
    firsts_ptr,  # int32: the lowest id that has it
    unsound_ptr,  # int32: 1 where the tile holds a NaN or an infinity
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    seats_ptr,
    counts_ptr,
    in_prompt_ptr,
    allowed_ptr,
    num_ids,
    num_tiles,
    row_stride,
    counts_stride,
    in_prompt_stride,
    allowed_stride,
    TILE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Penalties, mask, and what is to be known of a tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    is_id = ids < num_ids
    at = logits_ptr + row * row_stride + ids
    x = tl.load(at, mask=is_id, other=0.0)
    is_sound = tl.abs(x) <= _LARGEST
    x = tl.where(is_sound | (x == float("-inf")), x, 0.0)
    if HAS_PENALTIES:
        seat = tl.load(seats_ptr + row).to(tl.int64)
        count = tl.load(counts_ptr + seat * counts_stride + ids, mask=is_id, other=0)
        in_prompt = tl.load(in_prompt_ptr + seat * in_prompt_stride + ids, mask=is_id, other=0)
        repetition = tl.load(repetition_ptr + row) + tl.zeros_like(x)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((count > 0) | (in_prompt != 0), repeated, x)
        penalty = tl.load(frequency_ptr + row) * count.to(tl.float32) + tl.load(presence_ptr + row)
        x = tl.where(count > 0, x - penalty, x)
    if HAS_MASK:
        word = tl.load(allowed_ptr + row * allowed_stride + ids // 32, mask=is_id, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    if HAS_PENALTIES or HAS_MASK:
        tl.store(at, x, mask=is_id)
    x = tl.where(is_id, x, float("-inf"))
    top = tl.max(x, axis=0)
    to = row * num_tiles + tile
    tl.store(tops_ptr + to, top)
    tl.store(firsts_ptr + to, tl.min(tl.where(x == top, ids, 0x7FFFFFFF), axis=0))
    tl.store(unsound_ptr + to, tl.max(tl.where(is_id, tl.where(is_sound, 0, 1), 0), axis=0))


@triton.jit
def _weights(x, ids, top, scale, row, cut_keys_ptr, cut_ids_ptr, min_ps_ptr, HAS_CUTS: tl.constexpr):
    """2^((x - top) · scale) of the tokens that are left, else 0; the best token's is 1."""
    weight = tl.exp2((x - top) * scale)
    if HAS_CUTS:
        is_kept = keeps(key_of(x), ids, tl.load(cut_keys_ptr + row), tl.load(cut_ids_ptr + row))
        is_kept = is_kept & (weight.to(tl.float64) >= tl.load(min_ps_ptr + row))
        weight = tl.where(is_kept, weight, 0.0)
    return weight


@triton.jit(do_not_specialize=["num_tiles"])
def _weigh(
    logits_ptr,
    tops_ptr,
    temperatures_ptr,
    min_ps_ptr,
    cut_keys_ptr,
    cut_ids_ptr,
    masses_ptr,  # float32 [R, num_tiles]
    num_ids,
    num_tiles,
    row_stride,
    TILES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    """The weight of what is left of a tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    tiles = tl.arange(0, TILES_PADDED)
    tops = tl.load(tops_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    top = tl.max(tops, axis=0)
    if (temperature < GREEDY) | (top == float("-inf")):
        return
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
    scale = tl.div_rn(1.44269504, temperature)
    weight = _weights(x, ids, top, scale, row, cut_keys_ptr, cut_ids_ptr, min_ps_ptr, HAS_CUTS)
    tl.store(masses_ptr + row * num_tiles + tile, tl.sum(weight, axis=0))


@triton.jit(do_not_specialize=["num_tiles"])
def _draw(
    logits_ptr,
    tops_ptr,
    firsts_ptr,
    unsound_ptr,
    masses_ptr,
    temperatures_ptr,
    min_ps_ptr,
    cut_keys_ptr,
    cut_ids_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    out_ptr,  # int64 [R]
    num_ids,
    num_tiles,
    row_stride,
    TILES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    IS_GREEDY: tl.constexpr,
):
    """The token: the best, or the first at which the sum of weights in the order of ids passes the number drawn."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_PADDED)
    is_tile = tiles < num_tiles
    tops = tl.load(tops_ptr + row * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    unsound = tl.load(unsound_ptr + row * num_tiles + tiles, mask=is_tile, other=0)
    top = tl.max(tops, axis=0)
    if (tl.max(unsound, axis=0) != 0) | (top == float("-inf")) | (top > _LARGEST):
        tl.store(out_ptr + row, _FAILED)
        return
    firsts = tl.load(firsts_ptr + row * num_tiles + tiles, mask=is_tile, other=0)
    token = tl.min(tl.where(tops == top, firsts, 0x7FFFFFFF), axis=0)
    if not IS_GREEDY:
        temperature = tl.load(temperatures_ptr + row)
        if temperature >= GREEDY:
            masses = tl.load(masses_ptr + row * num_tiles + tiles, mask=is_tile, other=0.0).to(tl.float64)
            sums = tl.cumsum(masses, axis=0)
            choice, position = tl.load(choices_ptr + row), tl.load(positions_ptr + row)
            target = uniform(tl.load(seeds_ptr + row), choice, position) * tl.max(sums, axis=0)
            num_passed = tl.sum((is_tile & (sums <= target)).to(tl.int32), axis=0)
            tile = tl.minimum(num_passed, tl.max(tl.where(masses > 0.0, tiles, 0), axis=0))
            before = tl.sum(tl.where(tiles == tile - 1, sums, 0.0), axis=0)
            ids = tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < num_ids, other=float("-inf"))
            scale = tl.div_rn(1.44269504, temperature)
            weight = _weights(x, ids, top, scale, row, cut_keys_ptr, cut_ids_ptr, min_ps_ptr, HAS_CUTS)
            passes = (weight > 0.0) & (before + tl.cumsum(weight.to(tl.float64), axis=0) > target)
            last = tl.max(tl.where(weight > 0.0, ids, 0), axis=0)
            token = tl.minimum(tl.min(tl.where(passes, ids, 0x7FFFFFFF), axis=0), last)
    tl.store(out_ptr + row, token.to(tl.int64))


@dataclass(frozen=True, slots=True)
class _Survey:
    """What is known of each tile [R, num_tiles]."""

    tops: torch.Tensor
    firsts: torch.Tensor
    unsound: torch.Tensor


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token for each row of logits float32 [R, V], or FAILED: int64 [R]; logits may be written over.

    The bits of the random numbers, ties and the order of all changes are those of the native runner; weights are
    float32, so a draw within rounding of a border between two tokens may fall on either side of it.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    num_rows, num_ids = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if batch.edits is None:
        survey = _look(logits, batch, changed=True)
    else:
        raw = _look(logits, batch, changed=False)
        num_edits = batch.edits.rows.shape[0]
        _edit[(triton.cdiv(num_edits, 128),)](
            logits, batch.edits.rows, batch.edits.ids, batch.edits.values, num_edits, logits.stride(0), BLOCK=128
        )
        after = _look(logits, batch, changed=True)
        survey = _Survey(after.tops, after.firsts, raw.unsound)
    num_tiles = survey.tops.shape[1]
    padded = triton.next_power_of_2(num_tiles)
    cut_keys = cut_ids = masses = survey.firsts
    if batch.has_cuts and not batch.is_greedy:
        cut_keys = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        cut_ids = torch.empty_like(cut_keys)
        cut[(num_rows,)](
            logits,
            survey.tops,
            batch.temperatures,
            batch.top_ks,
            batch.top_ps,
            cut_keys,
            cut_ids,
            num_ids,
            num_tiles,
            logits.stride(0),
            TILES_PADDED=padded,
            CHUNK=min(MAX_CHUNK, triton.next_power_of_2(num_ids)),
            num_warps=16,
        )
    if not batch.is_greedy:
        masses = torch.empty_like(survey.tops)
        _weigh[num_rows, num_tiles](
            logits,
            survey.tops,
            batch.temperatures,
            batch.min_ps,
            cut_keys,
            cut_ids,
            masses,
            num_ids,
            num_tiles,
            logits.stride(0),
            TILES_PADDED=padded,
            TILE=TILE,
            HAS_CUTS=batch.has_cuts,
            num_warps=4,
        )
    _draw[(num_rows,)](
        logits,
        survey.tops,
        survey.firsts,
        survey.unsound,
        masses,
        batch.temperatures,
        batch.min_ps,
        cut_keys,
        cut_ids,
        batch.seeds,
        batch.choices,
        batch.positions,
        out,
        num_ids,
        num_tiles,
        logits.stride(0),
        TILES_PADDED=padded,
        TILE=TILE,
        HAS_CUTS=batch.has_cuts and not batch.is_greedy,
        IS_GREEDY=batch.is_greedy,
        num_warps=4,
    )
    return out


def _look(logits: torch.Tensor, batch: SamplingBatch, *, changed: bool) -> _Survey:
    """A survey of the logits as they are, or after penalties and mask, which are then in them."""
    num_rows, num_ids = logits.shape
    num_tiles = triton.cdiv(num_ids, TILE)
    tops = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    firsts = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=logits.device)
    unsound = torch.empty_like(firsts)
    counts, in_prompt, allowed = batch.output_counts, batch.is_in_prompt, batch.allowed
    _survey[num_rows, num_tiles](
        logits,
        tops,
        firsts,
        unsound,
        batch.repetition_penalties,
        batch.presence_penalties,
        batch.frequency_penalties,
        batch.seats,
        firsts if counts is None else counts,
        firsts if in_prompt is None else in_prompt,
        firsts if allowed is None else allowed,
        num_ids,
        num_tiles,
        logits.stride(0),
        0 if counts is None else counts.stride(0),
        0 if in_prompt is None else in_prompt.stride(0),
        0 if allowed is None else allowed.stride(0),
        TILE=TILE,
        HAS_PENALTIES=changed and counts is not None,
        HAS_MASK=changed and allowed is not None,
        num_warps=4,
    )
    return _Survey(tops, firsts, unsound)
