// One split of attention over pairs of integers: sums of products of integers, which no order can change.
#pragma once

#include "attention_parts_body.hpp"
#include "quantize.hpp"

// A loop over registers: unrolled before gcc decides what it keeps in them.
#define EVERYSTOP_UNROLL _Pragma("GCC unroll 8")

namespace everystop {
namespace {

constexpr int32_t kInt8Levels = 127;

// What multiplies int8 in a sum of `count` products is at most this, so that the sum has 32 bits.
constexpr float levels_beside(int64_t count) {
  const int64_t levels = INT32_MAX / (kInt8Levels * count);
  return static_cast<float>(levels < INT16_MAX ? levels : INT16_MAX);
}

// The queries of a tile, each on a grid of its own: int16 [num_queries][stride], then what one step of each
// grid is worth.
struct PairedQueries {
  PairedQueries(float* scratch, int64_t num_queries, int64_t value_stride)
      : steps(scratch + num_queries * value_stride / 2), stride(value_stride) {
    std::memcpy(&of, &scratch, sizeof of);
  }
  int16_t* of;
  float* steps;
  int64_t stride;
};

inline void round_queries(const KvLayout& layout, const AttentionTile& tile, const PairedQueries& queries) {
  const float levels = levels_beside(layout.unscaled_key_rows());
  for (int64_t q = 0; q < tile.num_rows * tile.group; ++q) {
    const float* x = tile.queries + q / tile.group * tile.query_stride + q % tile.group * layout.head_dim;
    int16_t* rounded = queries.of + q * queries.stride;
    const float step = quantize_to(x, layout.head_dim, levels, rounded);
    for (int64_t d = layout.head_dim; d < queries.stride; ++d) rounded[d] = 0;
    queries.steps[q] = step * (tile.scale * kLog2E);
  }
}

// scores[q][16 v …] for kQ query vectors and kV vectors of keys. Meanwhile the values of the same positions
// are fetched, as by score_tile.
template <int kQ, int kV>
inline void score_pairs(const int16_t* queries, int64_t query_stride, int64_t num_pairs,
                        const int8_t* const* keys, const int8_t* const* values, int64_t key_stride,
                        float* scores) {
  Sums16 sums[kQ][kV];
  EVERYSTOP_UNROLL
  for (int q = 0; q < kQ; ++q) {
    EVERYSTOP_UNROLL
    for (int v = 0; v < kV; ++v) sums[q][v] = no_sums();
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    Pairs16 k[kV];
    EVERYSTOP_UNROLL
    for (int v = 0; v < kV; ++v) {
      k[v] = load_pairs(keys[v] + pair * key_stride);
      __builtin_prefetch(values[v] + pair * 32, 0, 2);
    }
    EVERYSTOP_UNROLL
    for (int q = 0; q < kQ; ++q) {
      const Pairs16 x = splat_pair(queries + q * query_stride + 2 * pair);
      EVERYSTOP_UNROLL
      for (int v = 0; v < kV; ++v) sums[q][v] = add_products(x, k[v], sums[q][v]);
    }
  }
  EVERYSTOP_UNROLL
  for (int q = 0; q < kQ; ++q) {
    EVERYSTOP_UNROLL
    for (int v = 0; v < kV; ++v) store(scores + q * kAttentionSplit + v * 16, to_floats(sums[q][v]));
  }
}

template <int kQ>
void score_pairs_of(int64_t num_queries, const int16_t* queries, int64_t query_stride, int64_t num_pairs,
                    const Split<int8_t>& split, int64_t key_stride, float* scores) {
  if (num_queries == kQ) {
    int64_t v = 0;
    for (; v + kTileKeys <= split.num_vectors; v += kTileKeys) {
      score_pairs<kQ, kTileKeys>(queries, query_stride, num_pairs, split.keys + v, split.values + v,
                                 key_stride, scores + v * 16);
    }
    for (; v < split.num_vectors; ++v) {
      score_pairs<kQ, 1>(queries, query_stride, num_pairs, split.keys + v, split.values + v, key_stride,
                         scores + v * 16);
    }
  } else if constexpr (kQ > 1) {
    score_pairs_of<kQ - 1>(num_queries, queries, query_stride, num_pairs, split, key_stride, scores);
  }
}

// What the weights of one query vector in a split say of it: the largest score, the sum of the weights, and
// what one step of the grid of weights is worth.
struct PairedWeights {
  float top, sum, step;
};

// 2^x for x <= 0, within 4e-6 of relative error: finer than the grid that weights are rounded to. Below -60
// it stays at 2^-60, which no sum of weights near 1 can show; NaN is kept.
//
// x = n + f as in exp2_clamped; 2^f on [-1/2, 1/2] is a polynomial of degree 4, 1 at 0.
inline Vec16 exp2_of_weight(Vec16 x) {
  x = max(splat(-60.0f), x);
  const Vec16 magic = splat(12582912.0f);
  const Vec16 shifted = add(x, magic);
  const Vec16 f = sub(x, sub(shifted, magic));
  Vec16 p = splat(9.5828530384e-03f);
  p = fma(p, f, splat(5.5906424678e-02f));
  p = fma(p, f, splat(2.4024098612e-01f));
  p = fma(p, f, splat(6.9312419340e-01f));
  p = fma(p, f, splat(1.0f));
  return times_power_of_two(p, shifted);
}

// Turns the scores of the first num_keys of a split, in units of query_step and their keys' scales, into
// weights 2^(score - max) times the scales of the values, as int16 in the same place; later ones become 0.
// The scales of the values lie value_scales floats behind those of the keys.
inline PairedWeights weigh_pairs(float* scores, int64_t num_keys, float query_step,
                                 const Split<int8_t>& split, int64_t value_scales) {
  const int64_t whole = num_keys / 16, rest = num_keys % 16, num_used = whole + (rest > 0 ? 1 : 0);
  Vec16 top = splat(-__builtin_inff());
  for (int64_t v = 0; v < num_used; ++v) {
    const Vec16 score = mul(load(scores + v * 16), load(split.scales[v]));
    store(scores + v * 16, score);
    top = max(top, v < whole ? score : keep_first(score, rest, -__builtin_inff()));
  }
  const float largest = max_lanes(top) * query_step;
  const Vec16 step = splat(query_step), shift = splat(-largest);
  Vec16 sum = zeros(), worth = zeros(), most = zeros();
  for (int64_t v = 0; v < num_used; ++v) {
    Vec16 weight = exp2_of_weight(fma(load(scores + v * 16), step, shift));
    if (v == whole) weight = keep_first(weight, rest, 0.0f);
    sum = add(sum, weight);
    Vec16 scaled = mul(weight, load(split.scales[v] + value_scales));
    if (v == whole) scaled = keep_first(scaled, rest, 0.0f);
    store(scores + v * 16, scaled);
    worth = add(worth, scaled);
    most = max(most, scaled);
  }
  constexpr float levels = levels_beside(kAttentionSplit);
  const float heaviest = max_lanes(most), all = sum_lanes(worth);
  const bool is_finite = all - all == 0.0f;
  const Vec16 inverse = splat(is_finite && heaviest >= kSmallestMagnitude ? levels / heaviest : 0.0f);
  int16_t* weights;
  std::memcpy(&weights, &scores, sizeof weights);
  for (int64_t v = 0; v < split.num_vectors; ++v) {
    const bool is_used = v < num_used && is_finite;
    store_rounded(weights + v * 16, is_used ? mul(load(scores + v * 16), inverse) : zeros());
  }
  return {largest, sum_lanes(sum), is_finite ? heaviest / levels : __builtin_nanf("")};
}

// o[q][16 kD] = the step of weights[q] times the sum of weights[q][t] · values[t] for t below 2 num_pairs.
template <int kQ, int kD>
inline void value_pairs(const float* weights, const PairedWeights* of, const int8_t* const* values,
                        int64_t value_stride, int64_t dim_offset, int64_t num_pairs, NextKeys<int8_t>& next,
                        float* o) {
  Sums16 sums[kQ][kD];
  EVERYSTOP_UNROLL
  for (int q = 0; q < kQ; ++q) {
    EVERYSTOP_UNROLL
    for (int i = 0; i < kD; ++i) sums[q][i] = no_sums();
  }
  const int16_t* pairs;
  std::memcpy(&pairs, &weights, sizeof pairs);
  for (int64_t first = 0; first < num_pairs; first += 8) {
    const int8_t* v = values[first / 8] + 2 * dim_offset;
    const int64_t last = first + 8 < num_pairs ? first + 8 : num_pairs;
    for (int64_t pair = first; pair < last; ++pair, v += 2 * value_stride) {
      next.fetch();
      Pairs16 x[kD];
      EVERYSTOP_UNROLL
      for (int i = 0; i < kD; ++i) x[i] = load_pairs(v + i * 32);
      EVERYSTOP_UNROLL
      for (int q = 0; q < kQ; ++q) {
        const Pairs16 w = splat_pair(pairs + q * 2 * kAttentionSplit + 2 * pair);
        EVERYSTOP_UNROLL
        for (int i = 0; i < kD; ++i) sums[q][i] = add_products(w, x[i], sums[q][i]);
      }
    }
  }
  EVERYSTOP_UNROLL
  for (int q = 0; q < kQ; ++q) {
    EVERYSTOP_UNROLL
    for (int i = 0; i < kD; ++i)
      store(o + q * value_stride + i * 16, mul(to_floats(sums[q][i]), splat(of[q].step)));
  }
}

template <int kQ>
void value_pairs_of(int64_t num_queries, const float* weights, const PairedWeights* of,
                    const int8_t* const* values, int64_t value_stride, int64_t num_pairs,
                    NextKeys<int8_t>& next, float* o) {
  if (num_queries == kQ) {
    int64_t d = 0;
    for (; d + 16 * kTileDims <= value_stride; d += 16 * kTileDims) {
      value_pairs<kQ, kTileDims>(weights, of, values, value_stride, d, num_pairs, next, o + d);
    }
    for (; d < value_stride; d += 16)
      value_pairs<kQ, 1>(weights, of, values, value_stride, d, num_pairs, next, o + d);
  } else if constexpr (kQ > 1) {
    value_pairs_of<kQ - 1>(num_queries, weights, of, values, value_stride, num_pairs, next, o);
  }
}

// A value that a row must not see has the weight 0, whatever it is: all rows of a tile are done together.
inline void attend_split(const KvLayout& layout, const Split<int8_t>& split, int64_t num_queries,
                         float* prepared, NextKeys<int8_t>& next, float* scores, const Partial& out) {
  const int64_t stride = layout.value_stride();
  const PairedQueries queries(prepared, num_queries, stride);
  for (int64_t q = 0; q < num_queries; q += kTileQueries) {
    const int64_t n = num_queries - q < kTileQueries ? num_queries - q : kTileQueries;
    score_pairs_of<kTileQueries>(n, queries.of + q * stride, stride, layout.unscaled_key_rows() / 2, split,
                                 2 * layout.block_size, scores);
    PairedWeights weights[kTileQueries];
    for (int64_t i = 0; i < n; ++i) {
      weights[i] = weigh_pairs(scores + i * kAttentionSplit, split.num_keys(q + i), queries.steps[q + i],
                               split, layout.block_size);
      out.tops[q + i] = weights[i].top;
      out.sums[q + i] = weights[i].sum;
    }
    const int64_t num_pairs = (split.num_keys(q + n - 1) + 1) / 2;
    value_pairs_of<kTileQueries>(n, scores, weights, split.values, stride, num_pairs, next,
                                 out.o + q * stride);
  }
}

}  // namespace
}  // namespace everystop
