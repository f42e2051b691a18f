// Attention over Vec16; included once by each instruction-set path. See attention.hpp for the order of sums.
//
// Query vectors of a tile are numbered row-major: vector q belongs to row q / group. For each split of 256
// positions: scores of 16 keys at a time, softmax weights in place, then values; register tiles hold
// kTileQueries query vectors.
#pragma once

#include <type_traits>

#include "activation_body.hpp"
#include "norm_body.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

// Elements that are worth what they say only times the scale of their token and head.
template <class Element>
constexpr bool kIsScaled = std::is_same_v<Element, int8_t>;

constexpr int64_t kVectorsPerSplit = kAttentionSplit / 16;
constexpr float kLog2E = 1.44269504f;

inline float max_lanes(Vec16 x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 1; i < 16; ++i) lanes[0] = lanes[i] > lanes[0] || lanes[i] != lanes[i] ? lanes[i] : lanes[0];
  return lanes[0];
}

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

// The keys to score next, fetched a few lines at a time while values are summed: of each group of tokens so
// many lines, `stride` elements apart.
template <class Element>
struct NextKeys {
  static constexpr int64_t kPerLine = 64 / static_cast<int64_t>(sizeof(Element));
  // Of a head of 64 dimensions, and its scales.
  static constexpr int kLinesPerKey = static_cast<int>(sizeof(Element)) + (kIsScaled<Element> ? 1 : 0);
  const Element* groups[kAttentionSplit / 16 + 1];  // the last is null
  int64_t stride, num_lines;
  const Element* at = nullptr;
  int64_t group = 0, left = 0;

  void fetch() {
    for (int i = 0; i < kLinesPerKey; ++i) fetch_one();
  }
  void fetch_one() {
    if (left == 0) {
      if (groups[group] == nullptr) return;
      at = groups[group++];
      left = num_lines;
    }
    __builtin_prefetch(at, 0, 2);
    at += stride;
    --left;
  }
};

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
// last key become exactly 0, or anything where there are scales: scales[v] points at those of keys 16 v …,
// and those of the values lie value_scales floats behind.
template <bool kScaled>
inline float weigh_scores(float* scores, int64_t num_keys, const float* const* scales, int64_t value_scales,
                          float* largest) {
  const int64_t whole = num_keys / 16, rest = num_keys % 16;
  if constexpr (kScaled) {
    for (int64_t v = 0; v < whole + (rest > 0 ? 1 : 0); ++v)
      store(scores + v * 16, mul(load(scores + v * 16), load(scales[v])));
  }
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
    if constexpr (kScaled) {
      store(scores + v * 16, mul(weight, load(scales[v] + value_scales)));
    } else {
      store(scores + v * 16, weight);
    }
  }
  return sum_lanes(sum);
}

// What some splits of a tile add up to: for each query vector the largest score, the sum of weights, and the
// weighted values [stride].
struct Partial {
  Partial(float* data, int64_t num_queries, int64_t stride)
      : tops(data + num_queries * stride), sums(tops + num_queries), o(data) {}
  float* tops;
  float* sums;
  float* o;
};

// Adds the next split of one query vector to what earlier splits gave.
inline void merge_query(const Partial& into, const Partial& split, int64_t q, int64_t stride) {
  const float old_top = into.tops[q], new_top = split.tops[q];
  const float largest = old_top < new_top || new_top != new_top ? new_top : old_top;
  const float old_factor = exp2_or_zero(old_top - largest), new_factor = exp2_or_zero(new_top - largest);
  into.sums[q] = into.sums[q] * old_factor + split.sums[q] * new_factor;
  into.tops[q] = largest;
  float* o = into.o + q * stride;
  const float* added = split.o + q * stride;
  for (int64_t i = 0; i < stride; i += 16) {
    store(o + i, fma(load(added + i), splat(new_factor), mul(load(o + i), splat(old_factor))));
  }
}

inline void write_results(const KvLayout& layout, const AttentionTile& tile, const Partial& total) {
  for (int64_t q = 0; q < tile.num_rows * tile.group; ++q) {
    const float inverse = 1.0f / total.sums[q];
    const float* o = total.o + q * layout.value_stride();
    float* out = tile.out + q / tile.group * tile.out_stride + q % tile.group * layout.head_dim;
    for (int64_t d = 0; d < layout.head_dim; ++d) out[d] = o[d] * inverse;
  }
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

// The scales of a block's keys of one head, which begin at `head`: float [block_size], then of its values.
inline const float* scales_behind(const KvLayout& layout, const int8_t* head) {
  return reinterpret_cast<const float*>(head + layout.head_dim * layout.block_size);
}
inline float* scales_behind(const KvLayout& layout, int8_t* head) {
  return reinterpret_cast<float*>(head + layout.head_dim * layout.block_size);
}

// The keys of a tile's split that begins at position `begin`; none for a null tile.
template <class Element>
NextKeys<Element> next_keys(const KvLayout& layout, const Element* keys, const AttentionTile* tile,
                            int64_t begin) {
  constexpr int64_t per_line = NextKeys<Element>::kPerLine;
  const int64_t size = layout.block_size, step = per_line < size ? per_line : size;
  // Where a line holds more tokens than a block, it holds more than one row of its keys.
  NextKeys<Element> next{{}, size * per_line / step, (layout.key_rows() * step + per_line - 1) / per_line};
  if (tile == nullptr) return next;
  const int64_t num_keys = tile->first_position + tile->num_rows;
  const int64_t end = num_keys - begin < kAttentionSplit ? num_keys : begin + kAttentionSplit;
  for (int64_t i = 0; begin + i * step < end; ++i) {
    const int64_t position = begin + i * step;
    const Element* block = keys + tile->block_table[position / size] * layout.block_stride;
    next.groups[i] = block + tile->kv_head * layout.key_rows() * size + position % size;
  }
  return next;
}

// Where 16 keys and values at a time of one split lie, with their scales if they have any, and how many of
// the keys each query vector sees.
template <class Element>
struct Split {
  Split(const KvLayout& layout, const Element* all_keys, const Element* all_values, const AttentionTile& tile,
        int64_t begin)
      : first(tile.first_position + 1 - begin), group(tile.group) {
    const int64_t size = layout.block_size;
    const int64_t last = tile.first_position + tile.num_rows - begin;  // keys that the last row sees
    num_vectors = ((last < kAttentionSplit ? last : kAttentionSplit) + 15) / 16;
    for (int64_t v = 0; v < num_vectors; ++v) {
      const int64_t position = begin + v * 16, offset = position % size;
      const int64_t block = tile.block_table[position / size] * layout.block_stride;
      const Element* head = all_keys + block + tile.kv_head * layout.key_rows() * size;
      keys[v] = head + offset;
      if constexpr (kIsScaled<Element>) scales[v] = scales_behind(layout, head) + offset;
      values[v] = all_values + block + (tile.kv_head * size + offset) * layout.value_stride();
    }
  }
  int64_t num_keys(int64_t q) const {
    const int64_t n = first + q / group;
    return n < kAttentionSplit ? n : kAttentionSplit;
  }
  const Element* keys[kVectorsPerSplit];
  const Element* values[kVectorsPerSplit];
  const float* scales[kVectorsPerSplit];
  int64_t num_vectors, first, group;
};

template <class Element>
void attend_split(const KvLayout& layout, const Split<Element>& split, int64_t num_queries,
                  const float* queries, NextKeys<Element>& next, float* scores, const Partial& out) {
  const int64_t stride = layout.value_stride();
  for (int64_t i = 0; i < num_queries * stride; i += 16) store(out.o + i, zeros());
  for (int64_t q = 0; q < num_queries; q += kTileQueries) {
    const int64_t n = num_queries - q < kTileQueries ? num_queries - q : kTileQueries;
    score_queries<kTileQueries>(n, queries + q * stride, stride, layout.head_dim, split.keys, split.values,
                                split.num_vectors, layout.block_size, scores);
    for (int64_t i = 0; i < n; ++i) {
      out.sums[q + i] = weigh_scores<kIsScaled<Element>>(scores + i * kAttentionSplit, split.num_keys(q + i),
                                                         split.scales, layout.block_size, &out.tops[q + i]);
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

template <class Element>
void attend_elements(const KvLayout& layout, const Element* keys, const Element* values,
                     const AttentionTile& tile, const AttentionTile* following, float* scratch) {
  const int64_t stride = layout.value_stride(), num_queries = tile.num_rows * tile.group;
  const int64_t end = tile.first_position + tile.num_rows;
  float* queries = scratch;
  float* scores = queries + num_queries * stride;
  const Partial total(scores + kTileQueries * kAttentionSplit, num_queries, stride);
  const Partial part(total.sums + num_queries, num_queries, stride);
  scale_queries(layout, tile, queries);
  for (int64_t begin = 0; begin < end; begin += kAttentionSplit) {
    const int64_t after = begin + kAttentionSplit;
    NextKeys<Element> next =
        next_keys(layout, keys, after < end ? &tile : following, after < end ? after : 0);
    const Split<Element> split(layout, keys, values, tile, begin);
    attend_split(layout, split, num_queries, queries, next, scores, begin == 0 ? total : part);
    for (int64_t q = 0; q < num_queries && begin > 0; ++q) merge_query(total, part, q, stride);
  }
  write_results(layout, tile, total);
}

template <class Element>
void attend_one_split(const KvLayout& layout, const Element* keys, const Element* values,
                      const AttentionTile& tile, int64_t index, float* scratch, float* partial) {
  const int64_t stride = layout.value_stride(), num_queries = tile.num_rows * tile.group;
  NextKeys<Element> next = next_keys<Element>(layout, keys, nullptr, 0);
  const Split<Element> split(layout, keys, values, tile, index * kAttentionSplit);
  scale_queries(layout, tile, scratch);
  attend_split(layout, split, num_queries, scratch, next, scratch + num_queries * stride,
               Partial(partial, num_queries, stride));
}

// Calls body with some element of the layout's type.
template <class Body>
inline void with_element(const KvLayout& layout, Body&& body) {
  switch (layout.type) {
    case KvType::float32:
      return body(0.0f);
    case KvType::float16:
      return body(Half{});
    case KvType::int8:
      return body(int8_t{0});
  }
}

void attend(const KvLayout& layout, const void* keys, const void* values, const AttentionTile& tile,
            const AttentionTile* following, float* scratch) {
  with_element(layout, [&](auto element) {
    using Element = decltype(element);
    attend_elements(layout, static_cast<const Element*>(keys), static_cast<const Element*>(values), tile,
                    following, scratch);
  });
}

void attend_partly(const KvLayout& layout, const void* keys, const void* values, const AttentionTile& tile,
                   int64_t split, float* scratch, float* partial) {
  with_element(layout, [&](auto element) {
    using Element = decltype(element);
    attend_one_split(layout, static_cast<const Element*>(keys), static_cast<const Element*>(values), tile,
                     split, scratch, partial);
  });
}

void merge_partials(const KvLayout& layout, const AttentionTile& tile, float* partials,
                    int64_t partial_floats) {
  const int64_t stride = layout.value_stride(), num_queries = tile.num_rows * tile.group;
  const int64_t num_splits = (tile.first_position + tile.num_rows - 1) / kAttentionSplit + 1;
  const Partial total(partials, num_queries, stride);
  for (int64_t split = 1; split < num_splits; ++split) {
    const Partial part(partials + split * partial_floats, num_queries, stride);
    for (int64_t q = 0; q < num_queries; ++q) merge_query(total, part, q, stride);
  }
  write_results(layout, tile, total);
}

// Writes one token's keys and values of a head; key and value point at their places.
template <class Element>
inline void write_head(const KvLayout& layout, Element* key, Element* value, const float* k, const float* v) {
  const int64_t dim = layout.head_dim, size = layout.block_size;
  for (int64_t d = 0; d < dim; d += 16) {
    const int64_t n = dim - d < 16 ? dim - d : 16;
    Element rounded[16];
    store(rounded, n == 16 ? load(k + d) : load_first(k + d, n, 0.0f));
    for (int64_t i = 0; i < n; ++i) key[(d + i) * size] = rounded[i];
    store(value + d, n == 16 ? load(v + d) : load_first(v + d, n, 0.0f));
  }
}

// The same rounded to int8; the token's two scales go to scales[0] and scales[block_size]. The rows of values
// lend their place to the keys first; what pads them stays zero as the pool was made.
inline void write_head(const KvLayout& layout, int8_t* key, int8_t* value, float* scales, const float* k,
                       const float* v) {
  const int64_t dim = layout.head_dim, size = layout.block_size;
  scales[0] = quantize_group(k, dim, value);
  for (int64_t d = 0; d < dim; ++d) key[d * size] = value[d];
  scales[size] = quantize_group(v, dim, value);
}

template <class Element>
void write_elements(const KvLayout& layout, Element* keys, Element* values, int64_t block, int64_t offset,
                    const float* k, const float* v) {
  const int64_t dim = layout.head_dim, size = layout.block_size;
  for (int64_t head = 0; head < layout.num_kv_heads; ++head, k += dim, v += dim) {
    Element* first = keys + block * layout.block_stride + head * layout.key_rows() * size;
    Element* value = values + block * layout.block_stride + (head * size + offset) * layout.value_stride();
    if constexpr (kIsScaled<Element>) {
      write_head(layout, first + offset, value, scales_behind(layout, first) + offset, k, v);
    } else {
      write_head(layout, first + offset, value, k, v);
    }
  }
}

void write_token(const KvLayout& layout, void* keys, void* values, int64_t block, int64_t offset,
                 const float* k, const float* v) {
  with_element(layout, [&](auto element) {
    using Element = decltype(element);
    write_elements(layout, static_cast<Element*>(keys), static_cast<Element*>(values), block, offset, k, v);
  });
}

void widen(const Half* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(x + i));
  if (i < n) {
    Half rest[16] = {};
    for (int64_t j = i; j < n; ++j) rest[j - i] = x[j];
    store_first(out + i, load(rest), n - i);
  }
}

}  // namespace
}  // namespace everystop
