// The Hadamard transform in AVX-512 registers; see hadamard.hpp. Included only by files compiled for AVX-512.
#pragma once

#include <immintrin.h>

namespace everystop {
namespace {

// 16 lanes as one block.
inline __m512 hadamard_lanes(__m512 x) {
  const auto sign = [](__mmask16 negative) {
    return _mm512_mask_blend_ps(negative, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
  };
  x = _mm512_fmadd_ps(x, sign(0xff00), _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_fmadd_ps(x, sign(0xf0f0), _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_fmadd_ps(x, sign(0xcccc), _mm512_permute_ps(x, 0x4e));
  return _mm512_fmadd_ps(x, sign(0xaaaa), _mm512_permute_ps(x, 0xb1));
}

}  // namespace
}  // namespace everystop
