// Attention over Vec16; included once by each instruction-set path. See attention.hpp for the order of sums.
//
// Query vectors of a tile are numbered row-major: vector q belongs to row q / group. For each split of 256
// positions: scores of 16 keys at a time, softmax weights in place, then values; register tiles hold
// kTileQueries query vectors.
#pragma once

#include "attention_floats_body.hpp"
#include "attention_pairs_body.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

// Makes the queries of a tile ready for `attend_split`.
template <class Element>
void prepare_queries(const KvLayout& layout, const AttentionTile& tile, float* queries) {
  if constexpr (kIsInteger<Element>) {
    round_queries(layout, tile, PairedQueries(queries, tile.num_rows * tile.group, layout.value_stride()));
  } else {
    scale_queries(layout, tile, queries);
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
  prepare_queries<Element>(layout, tile, queries);
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
  prepare_queries<Element>(layout, tile, scratch);
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

// The same rounded to int8 in pairs: key points at the token's first pair, value at the first pair of its two
// tokens, of which it is number `which`; the token's two scales go to scales[0] and scales[block_size].
inline void write_pairs(const KvLayout& layout, int8_t* key, int8_t* value, int64_t which, float* scales,
                        const float* k, const float* v) {
  const int64_t dim = layout.head_dim, size = layout.block_size;
  const Grid of_keys = grid_over(k, dim, kInt8Levels), of_values = grid_over(v, dim, kInt8Levels);
  scales[0] = of_keys.step;
  scales[size] = of_values.step;
  for (int64_t d = 0; d < dim; d += 16) {
    const int64_t n = dim - d < 16 ? dim - d : 16;
    int8_t rounded[16];
    store_rounded(rounded, mul(n == 16 ? load(k + d) : load_first(k + d, n, 0.0f), splat(of_keys.inverse)));
    for (int64_t i = 0; i < n; i += 2) std::memcpy(key + (d + i) * size, rounded + i, 2);
    store_rounded(rounded, mul(n == 16 ? load(v + d) : load_first(v + d, n, 0.0f), splat(of_values.inverse)));
    for (int64_t i = 0; i < n; ++i) value[2 * (d + i) + which] = rounded[i];
  }
}

template <class Element>
void write_elements(const KvLayout& layout, Element* keys, Element* values, int64_t block, int64_t offset,
                    const float* k, const float* v) {
  const int64_t dim = layout.head_dim, size = layout.block_size;
  for (int64_t head = 0; head < layout.num_kv_heads; ++head, k += dim, v += dim) {
    Element* first = keys + block * layout.block_stride + head * layout.key_rows() * size;
    Element* value = values + block * layout.block_stride + head * size * layout.value_stride();
    if constexpr (kIsInteger<Element>) {
      write_pairs(layout, first + 2 * offset, value + offset / 2 * 2 * layout.value_stride(), offset % 2,
                  scales_behind(layout, first) + offset, k, v);
    } else {
      write_head(layout, first + offset, value + offset * layout.value_stride(), k, v);
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
