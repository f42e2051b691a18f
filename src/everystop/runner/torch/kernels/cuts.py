"""Where top-k and top-p cut a row of logits: at the last token that they leave, in the order "logit descending, id
ascending". It is searched for, by quarters of what is left; no vocabulary is sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from everystop.runner.torch.batch import GREEDY_TEMPERATURE

MAX_CHUNK = 4096  # logits that one program of `cut` looks at together
GREEDY = tl.constexpr(GREEDY_TEMPERATURE)


@triton.jit
def key_of(x):
    """The bits of a float as an integer of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keeps(key, ids, cut_key, cut_id):
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
        key = key_of(x)
        is_kept = keeps(key, ids, cut_key, cut_id) & (ids < num_ids)
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
        keys = key_of(x)
        is_tie = (keys == key) & keeps(keys, ids, cut_key, cut_id) & (ids < num_ids)
        running = num_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(is_tie & (running == count), ids, num_ids), axis=0))
        num_before += tl.sum(is_tie.to(tl.int32), axis=0)
    return found


@triton.jit(do_not_specialize=["num_tiles"])
def cut(
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
    if (temperature < GREEDY) | (top == float("-inf")):
        return
    row_ptr = logits_ptr + row * row_stride
    scale = tl.div_rn(1.44269504, temperature)
    high = key_of(top).to(tl.int64)
    cut_key = (high * 0 - 0x80000000).to(tl.int32)
    cut_id = (high * 0).to(tl.int32) + num_ids
    low = high * 0 - 0x7FFFFFFF
    k = tl.load(top_ks_ptr + row)
    if (k > 0) & (k < num_ids):
        if k <= num_tiles:  # each tile's best token is a token
            least_top = tl.min(tl.where(tiles < num_tiles, tops, top), axis=0)
            low = key_of(least_top).to(tl.int64)
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
        low = tl.maximum(low, tl.minimum(key_of(bound), key_of(top)).to(tl.int64))
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
