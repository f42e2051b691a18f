// The kernels of a decoder that are no linear layer, one table per instruction-set path.
//
// The operations are written once, in *_body.hpp, over 16-lane vectors that each path defines for itself
// (decoder_vectors_*.hpp). Every sum is taken in an order that depends only on the row's own position and
// sizes, so a row's result is the same bits in any batch, chunk, block size and number of threads.
#pragma once

#include <cstdint>

#include "attention.hpp"
#include "kv_cache.hpp"

namespace everystop {

struct DecoderKernels {
  // out[n] = x / sqrt(mean(x²) + eps) · weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // x[n] += delta[n], then as rms_norm.
  void (*add_rms_norm)(float* x, const float* delta, const float* weight, int64_t n, float eps, float* out);
  // x[n] += delta[n].
  void (*add)(float* x, const float* delta, int64_t n);
  // Rotates the pairs (x[i], x[i + half]) by the angles whose cosines and sines are given [half].
  void (*rotate_half)(float* x, const float* cosines, const float* sines, int64_t half);
  // Spreads what stands out in a head x[n]: a Hadamard transform, of length 1, of blocks of 64, 32 or 16, the
  // longest that n is a multiple of; of other heads nothing.
  void (*spread)(float* x, int64_t n);
  // out[n] = gate / (1 + exp(-gate)) · up.
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
  // Widens n halves.
  void (*widen)(const Half* x, int64_t n, float* out);
  // Writes one token's keys and values [num_kv_heads, head_dim] into its place in a block, rounded to its
  // type.
  void (*write_token)(const KvLayout& layout, void* keys, void* values, int64_t block, int64_t offset,
                      const float* k, const float* v);
  // `following` is the tile that the same thread will likely do next, or null: its first keys are fetched
  // early.
  void (*attend)(const KvLayout& layout, const void* keys, const void* values, const AttentionTile& tile,
                 const AttentionTile* following, float* scratch);
  // One split of a tile, by its index, into partial [attention_partial_floats].
  void (*attend_partly)(const KvLayout& layout, const void* keys, const void* values,
                        const AttentionTile& tile, int64_t split, float* scratch, float* partial);
  // Merges all splits of a tile, partial_floats apart, as `attend` would have, and writes its results.
  void (*merge_partials)(const KvLayout& layout, const AttentionTile& tile, float* partials,
                         int64_t partial_floats);
  // The greatest of x[n], n >= 1; *finite is false if any is NaN or infinite.
  float (*max_of)(const float* x, int64_t n, bool* finite);
  // The lowest index of `value` in x[n], or n.
  int64_t (*index_of)(const float* x, int64_t n, float value);
  // How many of x[n] are greater than `value`.
  int64_t (*count_greater)(const float* x, int64_t n, float value);
  // The lowest index >= first with x greater than `value`, or n.
  int64_t (*next_greater)(const float* x, int64_t first, int64_t n, float value);
  // out[i] = 2^((x[i] - shift) · scale), 0 where the exponent is below -125; returns the sum, taken over
  // lanes, then over runs of 256 in double. run_sums holds one sum per run of 256; out may be null.
  double (*exp2_of)(const float* x, int64_t n, float shift, float scale, float* out, float* run_sums);
};

const DecoderKernels& decoder_kernels_portable();
const DecoderKernels& decoder_kernels_avx2();
const DecoderKernels& decoder_kernels_avx512();

// The kernels of active_isa().
const DecoderKernels& decoder_kernels();

}  // namespace everystop
