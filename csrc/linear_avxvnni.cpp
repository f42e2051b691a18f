// Linear kernels for AVX-VNNI: 256-bit vectors with the byte dot product. Weights are the unsigned operand.
#include <immintrin.h>

namespace everystop {
namespace {

constexpr int kWeightOffset = 128;

__m256i dot_quad(__m256i sum, __m256i weights, __m256i activations) {
  return _mm256_dpbusd_avx_epi32(sum, weights, activations);
}

}  // namespace
}  // namespace everystop

#include "linear_ymm.hpp"

namespace everystop {

const LinearKernels& linear_kernels_avxvnni() {
  static constexpr LinearKernels kernels{
      "int8-g64-u8x32-v2", "float32-x32-v1", kMaxRows,  kWeightOffset,
      dot_in_registers,    quantize_tile,    int8_tile, float32_tile,
  };
  return kernels;
}

}  // namespace everystop
