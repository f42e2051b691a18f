// Linear kernels for AVX-512 with VNNI: tiles of up to 6 rows by 32 outputs, two vectors of outputs wide.
//
// Weights are the unsigned operand (stored plus 128), activations the signed one. The accumulator starts at
// -128 · Σ activations of the group, so the dot product needs no correction per output.
#include <immintrin.h>

#include <cstring>

#include "hadamard_avx512.hpp"
#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

constexpr int kMaxRows = 6;
constexpr int kQuads = kGroup / 4;

[[gnu::always_inline]] inline void prefetch(const Prefetch& ahead, int64_t group) {
  const char* line = reinterpret_cast<const char*>(ahead.start) + group * ahead.lines_per_group * 64;
  for (int i = 0; i < ahead.lines_per_group; ++i) _mm_prefetch(line + 64 * i, _MM_HINT_T1);
  const char* later = reinterpret_cast<const char*>(ahead.later) + group * ahead.later_lines_per_group * 64;
  for (int i = 0; i < ahead.later_lines_per_group; ++i) _mm_prefetch(later + 64 * i, _MM_HINT_T1);
}

__m512i broadcast_quad(const uint8_t* quad) {
  int32_t value;
  std::memcpy(&value, quad, sizeof value);
  return _mm512_set1_epi32(value);
}

// Inlined always, or the sums would live in memory throughout.
template <int kRows>
[[gnu::always_inline]] inline void store_tile(const __m512 (&sum)[kRows][2], const TileOutput& out) {
  const uint32_t mask = out.num_outputs == 32 ? 0xffffffffu : (1u << out.num_outputs) - 1;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __mmask16 part = static_cast<__mmask16>(mask >> (16 * half));
    const __m512 bias = out.bias == nullptr ? __m512() : _mm512_maskz_loadu_ps(part, out.bias + 16 * half);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 value = out.bias == nullptr ? sum[r][half] : _mm512_add_ps(sum[r][half], bias);
      _mm512_mask_storeu_ps(out.y + r * out.ldy + 16 * half, part, value);
    }
  }
}

template <int kRows>
void int8_tile_rows(const WeightGroup* weights, const uint8_t* activations, int64_t num_groups,
                    const Prefetch& ahead, const TileOutput& out) {
  __m512 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < num_groups; ++g) {
    prefetch(ahead, g);
    const uint8_t* scales = activations + kRows * kGroup;
    const uint8_t* starts = scales + kRows * sizeof(float);
    __m512i dot[kRows][2];
    for (int r = 0; r < kRows; ++r) dot[r][0] = dot[r][1] = broadcast_quad(starts + 4 * r);
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      const __m512i w0 = _mm512_load_si512(weights[g].values[quad]);
      const __m512i w1 = _mm512_load_si512(weights[g].values[quad][16]);
      for (int r = 0; r < kRows; ++r) {
        const __m512i a = broadcast_quad(activations + (quad * kRows + r) * 4);
        dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], w0, a);
        dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], w1, a);
      }
    }
    const __m512 w_scale[2] = {_mm512_load_ps(weights[g].scales), _mm512_load_ps(weights[g].scales + 16)};
    for (int r = 0; r < kRows; ++r) {
      const __m512 a_scale = _mm512_castsi512_ps(broadcast_quad(scales + 4 * r));
      for (int half = 0; half < 2; ++half) {
        sum[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][half]),
                                       _mm512_mul_ps(w_scale[half], a_scale), sum[r][half]);
      }
    }
    activations += kRows * kGroupBytesPerRow;
  }
  store_tile<kRows>(sum, out);
}

template <int kRows>
void float32_tile_rows(const float* weights, const float* activations, int64_t k, const Prefetch& ahead,
                       const TileOutput& out) {
  __m512 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; ++i) {
    if (i % kGroup == 0) prefetch(ahead, i / kGroup);
    const __m512 w0 = _mm512_load_ps(weights + i * kTileOutputs);
    const __m512 w1 = _mm512_load_ps(weights + i * kTileOutputs + 16);
    for (int r = 0; r < kRows; ++r) {
      const __m512 a = _mm512_set1_ps(activations[i * kRows + r]);
      sum[r][0] = _mm512_fmadd_ps(a, w0, sum[r][0]);
      sum[r][1] = _mm512_fmadd_ps(a, w1, sum[r][1]);
    }
  }
  store_tile<kRows>(sum, out);
}

void int8_tile(const WeightGroup* weights, const uint8_t* activations, int rows, int64_t num_groups,
               const Prefetch& ahead, const TileOutput& out) {
  switch (rows) {
    case 1:
      return int8_tile_rows<1>(weights, activations, num_groups, ahead, out);
    case 2:
      return int8_tile_rows<2>(weights, activations, num_groups, ahead, out);
    case 3:
      return int8_tile_rows<3>(weights, activations, num_groups, ahead, out);
    case 4:
      return int8_tile_rows<4>(weights, activations, num_groups, ahead, out);
    case 5:
      return int8_tile_rows<5>(weights, activations, num_groups, ahead, out);
    default:
      return int8_tile_rows<6>(weights, activations, num_groups, ahead, out);
  }
}

void float32_tile(const float* weights, const float* activations, int rows, int64_t k, const Prefetch& ahead,
                  const TileOutput& out) {
  switch (rows) {
    case 1:
      return float32_tile_rows<1>(weights, activations, k, ahead, out);
    case 2:
      return float32_tile_rows<2>(weights, activations, k, ahead, out);
    case 3:
      return float32_tile_rows<3>(weights, activations, k, ahead, out);
    case 4:
      return float32_tile_rows<4>(weights, activations, k, ahead, out);
    case 5:
      return float32_tile_rows<5>(weights, activations, k, ahead, out);
    default:
      return float32_tile_rows<6>(weights, activations, k, ahead, out);
  }
}

// The Hadamard transform of a block of 64, without a factor.
inline void hadamard(__m512 (&x)[4]) {
  const __m512 a = _mm512_add_ps(x[0], x[2]), b = _mm512_add_ps(x[1], x[3]);
  const __m512 c = _mm512_sub_ps(x[0], x[2]), d = _mm512_sub_ps(x[1], x[3]);
  x[0] = hadamard_lanes(_mm512_add_ps(a, b));
  x[1] = hadamard_lanes(_mm512_sub_ps(a, b));
  x[2] = hadamard_lanes(_mm512_add_ps(c, d));
  x[3] = hadamard_lanes(_mm512_sub_ps(c, d));
}

// Quantises one group of 64 inputs, of which those in `valid` exist, into int8 quads `stride` bytes apart.
void quantize_quads(const float* x, uint64_t valid, uint8_t* quads, int64_t stride, float* scale,
                    int32_t* start) {
  __m512 value[4];
  __m512i largest_bits = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    value[i] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid >> (16 * i)), x + 16 * i);
  }
  hadamard(value);
  for (int i = 0; i < 4; ++i) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(value[i]), _mm512_set1_epi32(0x7fffffff));
    largest_bits = _mm512_max_epi32(largest_bits, magnitude);
  }
  const float largest =
      _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(largest_bits))));
  const bool zero = largest < kSmallestMagnitude;
  const __m512 inverse = _mm512_set1_ps(zero ? 0.0f : 127.0f / largest);
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(value[i], inverse));
    total = _mm512_add_epi32(total, q);
    alignas(16) int32_t bytes[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtsepi32_epi8(q));
    for (int j = 0; j < 4; ++j) std::memcpy(quads + (4 * i + j) * stride, &bytes[j], 4);
  }
  *scale = zero ? 0.0f : largest / 127.0f * kHadamardScale;
  *start = static_cast<int32_t>(-128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(total)));
}

void quantize_tile(const float* x, int64_t ldx, int rows, int64_t k, uint8_t* activations) {
  for (int64_t first = 0; first < k; first += kGroup) {
    const uint64_t valid = k - first >= kGroup ? ~uint64_t{0} : (uint64_t{1} << (k - first)) - 1;
    float* scales = reinterpret_cast<float*>(activations + rows * kGroup);
    int32_t* starts = reinterpret_cast<int32_t*>(scales + rows);
    for (int r = 0; r < rows; ++r) {
      quantize_quads(x + r * ldx + first, valid, activations + 4 * r, 4 * rows, scales + r, starts + r);
    }
    activations += rows * kGroupBytesPerRow;
  }
}

int64_t dot_in_registers(int64_t iterations, int32_t* sink) {
  const __m512i operand = _mm512_set1_epi32(*sink);
  __m512i sum[12];
  for (__m512i& s : sum) s = operand;
  for (int64_t i = 0; i < iterations; ++i) {
    for (__m512i& s : sum) s = _mm512_dpbusd_epi32(s, operand, operand);
  }
  for (const __m512i& s : sum) *sink += _mm512_reduce_add_epi32(s);
  return iterations * 12 * 64;
}

}  // namespace

const LinearKernels& linear_kernels_avx512() {
  static constexpr LinearKernels kernels{
      "int8-g64-u8x32-v2", "float32-x32-v1", kMaxRows,  128,
      dot_in_registers,    quantize_tile,    int8_tile, float32_tile,
  };
  return kernels;
}

}  // namespace everystop
