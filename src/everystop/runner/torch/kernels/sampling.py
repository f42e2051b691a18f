"""Sampling: one token a row of logits, by the rules of the native runner (`csrc/sampling.hpp`) and its random numbers.

Four kernels. `_survey` looks at each tile of each row; `_cut` finds the last token that top-k and top-p leave, in the
order "logit descending, id ascending"; `_weigh` sums what is left of each tile; `_draw` picks a tile, and in it a
token. What a row gives depends on nothing but the row and its settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from everystop.runner.torch.batch import FAILED, GREEDY_TEMPERATURE, SamplingBatch

TILE = 1024
_CHUNK = 4096  # logits that one program of `_cut` looks at together
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
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
def _key(x):
    """The bits of a float as an integer of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
def _keeps(key, ids, cut_key, cut_id):
    """Whether tokens come before the cut, or are the last before it."""
    return (key > cut_key) | ((key == cut_key) & (ids <= cut_id))


@triton.jit
def _sums(
    row_ptr,
    num_ids,
    low,
    high,
    first,
    second,
    third,
    cut_key,
    cut_id,
    top,
    scale,
    CHUNK: tl.constexpr,
    MASS: tl.constexpr,
):
    """The weight of the kept tokens from each of three keys up, and the least and the largest key in [low, high].

    Each token weighs 1, or with MASS its share of the probability; numbers of tokens are exact in float32.
    """
    from_first = tl.zeros([CHUNK], tl.float32)
    from_second = tl.zeros([CHUNK], tl.float32)
    from_third = tl.zeros([CHUNK], tl.float32)
    least = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    largest = tl.full([CHUNK], -0x80000000, tl.int32)
    for begin in range(0, num_ids, CHUNK):
        ids = begin + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + ids, mask=ids < num_ids, other=float("-inf"))
        key = _key(x)
        is_kept = _keeps(key, ids, cut_key, cut_id) & (ids < num_ids)
        if MASS:
            weight = tl.where(is_kept, tl.exp2((x - top) * scale), 0.0)
        else:
            weight = tl.where(is_kept, 1.0, 0.0)
        from_first += tl.where(key >= first.to(tl.int32), weight, 0.0)
        from_second += tl.where(key >= second.to(tl.int32), weight, 0.0)
        from_third += tl.where(key >= third.to(tl.int32), weight, 0.0)
        is_between = is_kept & (key >= low.to(tl.int32)) & (key <= high.to(tl.int32))
        least = tl.minimum(least, tl.where(is_between, key, 0x7FFFFFFF))
        largest = tl.maximum(largest, tl.where(is_between, key, -0x80000000))
    return (
        tl.sum(from_first, axis=0),
        tl.sum(from_second, axis=0),
        tl.sum(from_third, axis=0),
        tl.min(least, axis=0).to(tl.int64),
        tl.max(largest, axis=0).to(tl.int64),
    )


@triton.jit
def _last_key(
    row_ptr, num_ids, low, high, target, cut_key, cut_id, top, scale, CHUNK: tl.constexpr, MASS: tl.constexpr
):
    """The highest key in [low, high] from which up the kept tokens weigh `target`, by quarters of what is left.

    After each look the bounds move to keys that occur, so the search ends once one is left.
    """
    while low < high:
        width = high - low
        first, second, third = low + (width + 3) // 4, low + (width + 1) // 2, low + (3 * width + 3) // 4
        a, b, c, least, largest = _sums(
            row_ptr, num_ids, low, high, first, second, third, cut_key, cut_id, top, scale, CHUNK, MASS
        )
        reach_a, reach_b, reach_c = a >= target, b >= target, c >= target
        new_high = tl.where(reach_c, high, tl.where(reach_b, third - 1, tl.where(reach_a, second - 1, first - 1)))
        new_low = tl.where(reach_c, third, tl.where(reach_b, second, tl.where(reach_a, first, low)))
        is_found = least <= largest
        low = tl.where(is_found, tl.maximum(new_low, least), new_low)
        high = tl.where(is_found, tl.minimum(new_high, largest), new_high)
    return low


@triton.jit
def _tie(row_ptr, num_ids, key, count, cut_key, cut_id, CHUNK: tl.constexpr):
    """The id of the kept token that is the `count`th of those with a key, in the order of ids."""
    num_before = count * 0
    found = num_ids + num_before
    for begin in range(0, num_ids, CHUNK):
        ids = begin + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + ids, mask=ids < num_ids, other=float("-inf"))
        keys = _key(x)
        is_tie = (keys == key) & _keeps(keys, ids, cut_key, cut_id) & (ids < num_ids)
        running = num_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(is_tie & (running == count), ids, num_ids), axis=0))
        num_before += tl.sum(is_tie.to(tl.int32), axis=0)
    return found


@triton.jit(do_not_specialize=["num_tiles"])
def _cut(
    logits_ptr,
    tops_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    cut_keys_ptr,  # int32 [R]
    cut_ids_ptr,  # int32 [R]
    num_ids,
    num_tiles,
    row_stride,
    TILES_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The last token that top-k and then top-p leave, as (key, id)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    tiles = tl.arange(0, TILES_PADDED)
    tops = tl.load(tops_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    top = tl.max(tops, axis=0)
    if (temperature < _GREEDY) | (top == float("-inf")):
        return
    row_ptr = logits_ptr + row * row_stride
    scale = tl.div_rn(1.44269504, temperature)
    high = _key(top).to(tl.int64)
    cut_key = (high * 0 - 0x80000000).to(tl.int32)
    cut_id = (high * 0).to(tl.int32) + num_ids
    low = high * 0 - 0x7FFFFFFF
    k = tl.load(top_ks_ptr + row)
    if (k > 0) & (k < num_ids):
        if k <= num_tiles:  # each tile's best token is a token
            least_top = tl.min(tl.where(tiles < num_tiles, tops, top), axis=0)
            low = _key(least_top).to(tl.int64)
        target = k.to(tl.float32)
        low = _last_key(row_ptr, num_ids, low, high, target, cut_key, cut_id, top, scale, CHUNK, False)
        above, _, _, _, _ = _sums(
            row_ptr, num_ids, low, low, low + 1, low + 1, low + 1, cut_key, cut_id, top, scale, CHUNK, False
        )
        new_key = low.to(tl.int32)
        cut_id = _tie(row_ptr, num_ids, new_key, k - above.to(tl.int32), cut_key, cut_id, CHUNK)
        cut_key = new_key
    p = tl.load(top_ps_ptr + row)
    if p < 1.0:
        all_kept, _, _, _, _ = _sums(
            row_ptr, num_ids, low, high, low, low, low, cut_key, cut_id, top, scale, CHUNK, True
        )
        target = (p * all_kept.to(tl.float64)).to(tl.float32)
        # Tokens below (1 - p) / num_ids of all weigh less than 1 - p together; half of it leaves room for rounding.
        dispensable = ((1.0 - p) * all_kept.to(tl.float64) / num_ids * 0.5).to(tl.float32)
        bound = top + tl.log2(tl.maximum(dispensable, 1e-37)) / scale
        low = tl.maximum(low, tl.minimum(_key(bound), _key(top)).to(tl.int64))
        low = _last_key(row_ptr, num_ids, low, high, target, cut_key, cut_id, top, scale, CHUNK, True)
        at_least, above, _, _, _ = _sums(
            row_ptr, num_ids, low, low, low, low + 1, low + 1, cut_key, cut_id, top, scale, CHUNK, True
        )
        new_key = low.to(tl.int32)
        value = (new_key ^ ((new_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        weight = tl.maximum(tl.exp2((value - top) * scale), 1e-37)
        ties = tl.maximum(tl.ceil((target - above) / weight), 1.0)
        if at_least - above > 1.5 * weight:
            count = tl.minimum(ties, 1e9).to(tl.int32)
            last = _tie(row_ptr, num_ids, new_key, count, cut_key, cut_id, CHUNK)
            cut_id = tl.where(new_key == cut_key, tl.minimum(cut_id, last), last)
        else:
            cut_id = tl.where(new_key == cut_key, cut_id, num_ids)
        cut_key = new_key
    tl.store(cut_keys_ptr + row, cut_key)
    tl.store(cut_ids_ptr + row, cut_id)


@triton.jit
def _weights(x, ids, top, scale, row, cut_keys_ptr, cut_ids_ptr, min_ps_ptr, HAS_CUTS: tl.constexpr):
    """2^((x - top) · scale) of the tokens that are left, else 0; the best token's is 1."""
    weight = tl.exp2((x - top) * scale)
    if HAS_CUTS:
        is_kept = _keeps(_key(x), ids, tl.load(cut_keys_ptr + row), tl.load(cut_ids_ptr + row))
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
    if (temperature < _GREEDY) | (top == float("-inf")):
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
        if temperature >= _GREEDY:
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
        _cut[(num_rows,)](
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
            CHUNK=min(_CHUNK, triton.next_power_of_2(num_ids)),
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
