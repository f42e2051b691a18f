// Causal attention of a few consecutive positions of one request over its paged KV cache, grouped KV heads.
//
// The keys of a row at position p are cut at fixed multiples of 256 of the request's own positions. Inside a
// split, scores are summed over ascending dimensions, softmax weights over 16 lanes (position mod 16) and
// then in a fixed tree, values over ascending positions; splits are merged from the first to the last. So a
// row does the same arithmetic in a decode step, in any prefill chunk, and for every block size. Of integer
// keys the scale multiplies a finished score, of integer values the weight.
//
// Over int8 the sums of products are integers: a query is rounded to a grid of its own of 16 bits, and so are
// the weights of a split, times the scales of the values; where a sum could exceed 32 bits, to a coarser one.
// Twice as many products fit into an instruction as in float32.
#pragma once

#include <cstdint>

#include "kv_cache.hpp"

namespace everystop {

constexpr int64_t kAttentionSplit = 256;
constexpr int64_t kMaxAttentionTileRows = 16;

// Rows at positions first_position … first_position + num_rows - 1, and the `group` query heads that share
// kv_head. Head g of row r reads queries[r · query_stride + g · head_dim] and writes out[r · out_stride + g ·
// head_dim]. A tile does not cross a multiple of 256.
struct AttentionTile {
  const int32_t* block_table;
  int64_t first_position;
  int64_t num_rows;
  int64_t kv_head;
  int64_t group;
  float scale;
  const float* queries;
  int64_t query_stride;
  float* out;
  int64_t out_stride;
};

// Rows of a tile that suit the kernel: a power of two that divides 256; tiles are cut at its multiples.
int64_t attention_tile_rows(int64_t group);

// Floats of scratch that one call of `attend` needs; aligned to 64 bytes.
int64_t attention_scratch_floats(const KvLayout& layout, int64_t group);

// Floats of what one split of a tile gives; partials lie this far apart.
int64_t attention_partial_floats(const KvLayout& layout, int64_t group);

// The slow, obvious version: two passes in double over all keys.
void attend_naive(const KvLayout& layout, const void* keys, const void* values, const AttentionTile& tile);

// The value of a stored half, for the naive versions.
float half_to_float(Half value);

}  // namespace everystop
