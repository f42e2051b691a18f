// What all kinds of attention share: where the keys and values of a split lie, what is fetched ahead, and how
// splits are merged. Included once by each instruction-set path.
#pragma once

#include <type_traits>

#include "activation_body.hpp"
#include "norm_body.hpp"

namespace everystop {
namespace {

// Integers are worth what they say only times the scale of their token and head.
template <class Element>
constexpr bool kIsInteger = std::is_integral_v<Element>;
// Elements of keys that lie beside each other for each token.
template <class Element>
constexpr int64_t kAbreast = kIsInteger<Element> ? 2 : 1;

constexpr int64_t kVectorsPerSplit = kAttentionSplit / 16;
constexpr float kLog2E = 1.44269504f;

// The keys to score next, fetched a few lines at a time while values are summed: of each group of tokens so
// many lines, `stride` elements apart.
template <class Element>
struct NextKeys {
  // Of a head of 64 dimensions, and its scales, for each step of value_tile or value_pairs.
  static constexpr int kLinesAtOnce =
      static_cast<int>(sizeof(Element) * kAbreast<Element>) + (kIsInteger<Element> ? 1 : 0);
  const Element* groups[kAttentionSplit / 16 + 1];  // the last is null
  int64_t stride, num_lines;
  const Element* at = nullptr;
  int64_t group = 0, left = 0;

  void fetch() {
    for (int i = 0; i < kLinesAtOnce; ++i) fetch_one();
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

// The scales of a block's keys of one head, which begin at `head`: float [block_size], then of its values.
template <class Element>
inline const float* scales_behind(const KvLayout& layout, const Element* head) {
  return reinterpret_cast<const float*>(head + layout.unscaled_key_rows() * layout.block_size);
}
template <class Element>
inline float* scales_behind(const KvLayout& layout, Element* head) {
  return reinterpret_cast<float*>(head + layout.unscaled_key_rows() * layout.block_size);
}

// The keys of a tile's split that begins at position `begin`; none for a null tile.
template <class Element>
NextKeys<Element> next_keys(const KvLayout& layout, const Element* keys, const AttentionTile* tile,
                            int64_t begin) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element)), kPerLine = kLine / kAbreast<Element>;
  // A block of few tokens is fetched as it lies; of a large one, each line of a row is a group of its own.
  const int64_t size = layout.block_size;
  const bool is_small = size <= 2 * kPerLine;
  const int64_t step = is_small ? size : kPerLine;
  NextKeys<Element> next{
      {},
      is_small ? kLine : kAbreast<Element> * size,
      is_small ? (layout.key_rows() * size + kLine - 1) / kLine : layout.key_rows() / kAbreast<Element>};
  if (tile == nullptr) return next;
  const int64_t num_keys = tile->first_position + tile->num_rows;
  const int64_t end = num_keys - begin < kAttentionSplit ? num_keys : begin + kAttentionSplit;
  for (int64_t i = 0; begin + i * step < end; ++i) {
    const int64_t position = begin + i * step;
    const Element* block = keys + tile->block_table[position / size] * layout.block_stride;
    next.groups[i] = block + tile->kv_head * layout.key_rows() * size + position % size * kAbreast<Element>;
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
      keys[v] = head + offset * kAbreast<Element>;
      if constexpr (kIsInteger<Element>) scales[v] = scales_behind(layout, head) + offset;
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

}  // namespace
}  // namespace everystop
