// One split of attention in float32, over elements of any type that a vector of floats is loaded from.
#pragma once

#include "attention_parts_body.hpp"

namespace everystop {
namespace {

// scores[q][16 v …] for kQ query vectors and kV vectors of keys: one chain over ascending dimensions each.
// Meanwhile the values of the same positions are fetched: the cache of many requests comes from memory, in
// blocks that lie apart.
template <int kQ, int kV, class Element>
inline void score_tile(const float* queries, int64_t query_stride, int64_t dim, const Element* const* keys,
                       const Element* const* values, int64_t key_stride, float* scores) {
  Vec16 sums[kQ][kV];
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kV; ++v) sums[q][v] = zeros();
  }
  for (int64_t d = 0; d < dim; ++d) {
    Vec16 k[kV];
    for (int v = 0; v < kV; ++v) {
      k[v] = load(keys[v] + d * key_stride);
      __builtin_prefetch(values[v] + d * 16, 0, 2);
    }
    for (int q = 0; q < kQ; ++q) {
      const Vec16 x = splat(queries[q * query_stride + d]);
      for (int v = 0; v < kV; ++v) sums[q][v] = fma(x, k[v], sums[q][v]);
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int v = 0; v < kV; ++v) store(scores + q * kAttentionSplit + v * 16, sums[q][v]);
  }
}

template <int kQ, int kV, class Element>
inline int64_t score_tiles(const float* queries, int64_t query_stride, int64_t dim,
                           const Element* const* keys, const Element* const* values, int64_t first,
                           int64_t num_vectors, int64_t key_stride, float* scores) {
  int64_t v = first;
  for (; v + kV <= num_vectors; v += kV) {
    score_tile<kQ, kV>(queries, query_stride, dim, keys + v, values + v, key_stride, scores + v * 16);
  }
  return v;
}

template <int kQ, class Element>
void score_queries(int64_t num_queries, const float* queries, int64_t query_stride, int64_t dim,
                   const Element* const* keys, const Element* const* values, int64_t num_vectors,
                   int64_t key_stride, float* scores) {
  if (num_queries == kQ) {
    const int64_t done = score_tiles<kQ, kTileKeys>(queries, query_stride, dim, keys, values, 0, num_vectors,
                                                    key_stride, scores);
    score_tiles<kQ, 1>(queries, query_stride, dim, keys, values, done, num_vectors, key_stride, scores);
  } else if constexpr (kQ > 1) {
    score_queries<kQ - 1>(num_queries, queries, query_stride, dim, keys, values, num_vectors, key_stride,
                          scores);
  }
}

// o[q][16 kD] += weights[q][t] · values[t] for t in [first, last), ascending. values[t / 16] points at
// position 16 (t / 16) of the split.
template <int kQ, int kD, class Element>
inline void value_tile(const float* weights, const Element* const* values, int64_t value_stride,
                       int64_t dim_offset, int64_t first, int64_t last, NextKeys<Element>& next, float* o) {
  Vec16 sums[kQ][kD];
  for (int q = 0; q < kQ; ++q) {
    for (int i = 0; i < kD; ++i) sums[q][i] = load(o + q * value_stride + i * 16);
  }
  for (int64_t t = first; t < last;) {
    const int64_t end = (t / 16 + 1) * 16 < last ? (t / 16 + 1) * 16 : last;
    const Element* v = values[t / 16] + t % 16 * value_stride + dim_offset;
    for (; t < end; ++t, v += value_stride) {
      next.fetch();
      Vec16 x[kD];
      for (int i = 0; i < kD; ++i) x[i] = load(v + i * 16);
      for (int q = 0; q < kQ; ++q) {
        const Vec16 w = splat(weights[q * kAttentionSplit + t]);
        for (int i = 0; i < kD; ++i) sums[q][i] = fma(w, x[i], sums[q][i]);
      }
    }
  }
  for (int q = 0; q < kQ; ++q) {
    for (int i = 0; i < kD; ++i) store(o + q * value_stride + i * 16, sums[q][i]);
  }
}

template <int kQ, class Element>
void value_queries(int64_t num_queries, const float* weights, const Element* const* values,
                   int64_t value_stride, int64_t first, int64_t last, NextKeys<Element>& next, float* o) {
  if (first >= last) return;
  if (num_queries == kQ) {
    int64_t d = 0;
    for (; d + 16 * kTileDims <= value_stride; d += 16 * kTileDims) {
      value_tile<kQ, kTileDims>(weights, values, value_stride, d, first, last, next, o + d);
    }
    for (; d < value_stride; d += 16)
      value_tile<kQ, 1>(weights, values, value_stride, d, first, last, next, o + d);
  } else if constexpr (kQ > 1) {
    value_queries<kQ - 1>(num_queries, weights, values, value_stride, first, last, next, o);
  }
}

// Turns num_keys scores into weights 2^(score - max) in place and returns the weights' sum. Lanes after the
// last key become exactly 0.
inline float weigh_scores(float* scores, int64_t num_keys, float* largest) {
  const int64_t whole = num_keys / 16, rest = num_keys % 16;
  Vec16 top = splat(-__builtin_inff());
  for (int64_t v = 0; v < whole; ++v) top = max(top, load(scores + v * 16));
  if (rest > 0) {
    const Vec16 last = keep_first(load(scores + whole * 16), rest, -__builtin_inff());
    store(scores + whole * 16, last);
    top = max(top, last);
  }
  *largest = max_lanes(top);
  const Vec16 shift = splat(*largest);
  Vec16 sum = zeros();
  for (int64_t v = 0; v < whole + (rest > 0 ? 1 : 0); ++v) {
    const Vec16 weight = exp2_or_zero(sub(load(scores + v * 16), shift));
    sum = add(sum, weight);
    store(scores + v * 16, weight);
  }
  return sum_lanes(sum);
}

// Queries [num_queries][stride] in units in which the weights are powers of two.
inline void scale_queries(const KvLayout& layout, const AttentionTile& tile, float* queries) {
  for (int64_t q = 0; q < tile.num_rows * tile.group; ++q) {
    const float* x = tile.queries + q / tile.group * tile.query_stride + q % tile.group * layout.head_dim;
    for (int64_t d = 0; d < layout.head_dim; ++d) {
      queries[q * layout.value_stride() + d] = x[d] * (tile.scale * kLog2E);
    }
  }
}

template <class Element>
void attend_split(const KvLayout& layout, const Split<Element>& split, int64_t num_queries, float* queries,
                  NextKeys<Element>& next, float* scores, const Partial& out) {
  const int64_t stride = layout.value_stride();
  for (int64_t i = 0; i < num_queries * stride; i += 16) store(out.o + i, zeros());
  for (int64_t q = 0; q < num_queries; q += kTileQueries) {
    const int64_t n = num_queries - q < kTileQueries ? num_queries - q : kTileQueries;
    score_queries<kTileQueries>(n, queries + q * stride, stride, layout.head_dim, split.keys, split.values,
                                split.num_vectors, layout.block_size, scores);
    for (int64_t i = 0; i < n; ++i) {
      out.sums[q + i] = weigh_scores(scores + i * kAttentionSplit, split.num_keys(q + i), &out.tops[q + i]);
    }
    // What all rows see is done together; a masked value must not be touched, so each row does its own rest.
    const int64_t shared = split.num_keys(q);
    value_queries<kTileQueries>(n, scores, split.values, stride, 0, shared, next, out.o + q * stride);
    for (int64_t i = 1; i < n; ++i) {
      value_queries<1>(1, scores + i * kAttentionSplit, split.values, stride, shared, split.num_keys(q + i),
                       next, out.o + (q + i) * stride);
    }
  }
}

}  // namespace
}  // namespace everystop
