// Linear kernels for AVX2 without VNNI.
//
// vpmaddubsw multiplies unsigned by signed bytes and saturates sums of two products at 16 bits: it gets |a|
// and w with the sign of a, so that a pair of products is at most 2 · 127 · 127 = 32,258 < 32,768.
#include <immintrin.h>

namespace everystop {
namespace {

constexpr int kWeightOffset = 0;

__m256i dot_quad(__m256i sum, __m256i weights, __m256i activations) {
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(activations), _mm256_sign_epi8(weights, activations));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

}  // namespace
}  // namespace everystop

#include "linear_ymm.hpp"

namespace everystop {

const LinearKernels& linear_kernels_avx2() {
  static constexpr LinearKernels kernels{
      "int8-g64-s8x32-v2", "float32-x32-v1", kMaxRows,  kWeightOffset,
      dot_in_registers,    quantize_tile,    int8_tile, float32_tile,
  };
  return kernels;
}

}  // namespace everystop
