// The tile loops that the two 256-bit paths share; each includes this once, after defining in its own unnamed
// namespace how a vector of weights meets a quad of activations:
//   __m256i dot_quad(__m256i sum, __m256i weights, __m256i activations)   8 outputs, 4 inputs each
//   constexpr int kWeightOffset
// Everything here is in an unnamed namespace for the reason given in quantize.hpp.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

// Two rows by 32 outputs fill the 16 registers, and read the weights in one go.
constexpr int kMaxRows = 2;
constexpr int kLanes = 8;
constexpr int kVectors = kTileOutputs / kLanes;

__m256i broadcast_quad(const uint8_t* quad) {
  int32_t value;
  std::memcpy(&value, quad, sizeof value);
  return _mm256_set1_epi32(value);
}

[[gnu::always_inline]] inline void prefetch(const Prefetch& ahead, int64_t group) {
  const char* line = reinterpret_cast<const char*>(ahead.start) + group * ahead.lines_per_group * 64;
  for (int i = 0; i < ahead.lines_per_group; ++i) _mm_prefetch(line + 64 * i, _MM_HINT_T1);
  const char* later = reinterpret_cast<const char*>(ahead.later) + group * ahead.later_lines_per_group * 64;
  for (int i = 0; i < ahead.later_lines_per_group; ++i) _mm_prefetch(later + 64 * i, _MM_HINT_T1);
}

template <int kRows>
[[gnu::always_inline]] inline void store_tile(const __m256 (&sum)[kRows][kVectors], const TileOutput& out) {
  for (int r = 0; r < kRows; ++r) {
    alignas(32) float row[kTileOutputs];
    for (int v = 0; v < kVectors; ++v) _mm256_store_ps(row + kLanes * v, sum[r][v]);
    float* y = out.y + r * out.ldy;
    if (out.bias != nullptr) {
      for (int o = 0; o < out.num_outputs; ++o) y[o] = row[o] + out.bias[o];
    } else {
      std::memcpy(y, row, static_cast<size_t>(out.num_outputs) * sizeof(float));
    }
  }
}

template <int kRows>
void int8_tile_rows(const WeightGroup* weights, const uint8_t* activations, int64_t num_groups,
                    const Prefetch& ahead, const TileOutput& out) {
  __m256 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_setzero_ps();
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    prefetch(ahead, g);
    const uint8_t* scales = activations + kRows * kGroup;
    const uint8_t* starts = scales + kRows * sizeof(float);
    __m256i dot[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) dot[r][v] = broadcast_quad(starts + 4 * r);
    }
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      __m256i w[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        w[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights[g].values[quad][kLanes * v]));
      }
      for (int r = 0; r < kRows; ++r) {
        const __m256i a = broadcast_quad(activations + (quad * kRows + r) * 4);
        for (int v = 0; v < kVectors; ++v) dot[r][v] = dot_quad(dot[r][v], w[v], a);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const __m256 a_scale = _mm256_castsi256_ps(broadcast_quad(scales + 4 * r));
      for (int v = 0; v < kVectors; ++v) {
        const __m256 w_scale = _mm256_load_ps(weights[g].scales + kLanes * v);
        sum[r][v] =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][v]), _mm256_mul_ps(w_scale, a_scale), sum[r][v]);
      }
    }
    activations += kRows * kGroupBytesPerRow;
  }
  store_tile<kRows>(sum, out);
}

template <int kRows>
void float32_tile_rows(const float* weights, const float* activations, int64_t k, const Prefetch& ahead,
                       const TileOutput& out) {
  __m256 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < k; ++i) {
    if (i % kGroup == 0) prefetch(ahead, i / kGroup);
    __m256 w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = _mm256_load_ps(weights + i * kTileOutputs + kLanes * v);
    for (int r = 0; r < kRows; ++r) {
      const __m256 a = _mm256_broadcast_ss(activations + i * kRows + r);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_fmadd_ps(a, w[v], sum[r][v]);
    }
  }
  store_tile<kRows>(sum, out);
}

void int8_tile(const WeightGroup* weights, const uint8_t* activations, int rows, int64_t num_groups,
               const Prefetch& ahead, const TileOutput& out) {
  if (rows == 1) return int8_tile_rows<1>(weights, activations, num_groups, ahead, out);
  int8_tile_rows<2>(weights, activations, num_groups, ahead, out);
}

void float32_tile(const float* weights, const float* activations, int rows, int64_t k, const Prefetch& ahead,
                  const TileOutput& out) {
  if (rows == 1) return float32_tile_rows<1>(weights, activations, k, ahead, out);
  float32_tile_rows<2>(weights, activations, k, ahead, out);
}

void quantize_tile(const float* x, int64_t ldx, int rows, int64_t k, uint8_t* activations) {
  quantize_rows(x, ldx, rows, k, kWeightOffset, activations);
}

int64_t dot_in_registers(int64_t iterations, int32_t* sink) {
  __m256i weights = _mm256_set1_epi32(*sink);
  const __m256i activations = weights;
  __m256i sum[12];
  for (__m256i& s : sum) s = weights;
  for (int64_t i = 0; i < iterations; ++i) {
    for (__m256i& s : sum) {
      asm("" : "+x"(weights));  // or what is the same for each sum is computed once
      s = dot_quad(s, weights, activations);
    }
  }
  alignas(32) int32_t lanes[8];
  for (const __m256i& s : sum) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), s);
    for (int32_t lane : lanes) *sink ^= lane;
  }
  return iterations * 12 * 32;
}

}  // namespace
}  // namespace everystop
