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

constexpr int kMaxRows = 4;
constexpr int kLanes = 8;
constexpr int kVectors = 2;  // output vectors computed together; a tile is two such passes
constexpr int kPassOutputs = kLanes * kVectors;

__m256i broadcast_quad(const uint8_t* quad) {
  int32_t value;
  std::memcpy(&value, quad, sizeof value);
  return _mm256_set1_epi32(value);
}

// Stores outputs [first, first + 16) of the tile, as far as they exist.
template <int kRows>
void store_pass(const __m256 (&sum)[kRows][kVectors], int first, const TileOutput& out) {
  const int count = out.num_outputs - first < kPassOutputs ? out.num_outputs - first : kPassOutputs;
  for (int r = 0; r < kRows; ++r) {
    alignas(32) float row[kPassOutputs];
    for (int v = 0; v < kVectors; ++v) _mm256_store_ps(row + kLanes * v, sum[r][v]);
    float* y = out.y + r * out.ldy + first;
    if (out.bias != nullptr) {
      for (int o = 0; o < count; ++o) y[o] = row[o] + out.bias[first + o];
    } else {
      std::memcpy(y, row, static_cast<size_t>(count) * sizeof(float));
    }
  }
}

template <int kRows>
void int8_pass(const WeightGroup* weights, const uint8_t* activations, int64_t num_groups, int first,
               const TileOutput& out) {
  __m256 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_setzero_ps();
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    const uint8_t* scales = activations + kRows * kGroup;
    const uint8_t* starts = scales + kRows * sizeof(float);
    __m256i dot[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) dot[r][v] = broadcast_quad(starts + 4 * r);
    }
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      __m256i w[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        w[v] =
            _mm256_load_si256(reinterpret_cast<const __m256i*>(weights[g].values[quad][first + kLanes * v]));
      }
      for (int r = 0; r < kRows; ++r) {
        const __m256i a = broadcast_quad(activations + (quad * kRows + r) * 4);
        for (int v = 0; v < kVectors; ++v) dot[r][v] = dot_quad(dot[r][v], w[v], a);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const __m256 a_scale = _mm256_castsi256_ps(broadcast_quad(scales + 4 * r));
      for (int v = 0; v < kVectors; ++v) {
        const __m256 w_scale = _mm256_load_ps(weights[g].scales + first + kLanes * v);
        sum[r][v] =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][v]), _mm256_mul_ps(w_scale, a_scale), sum[r][v]);
      }
    }
    activations += kRows * kGroupBytesPerRow;
  }
  store_pass<kRows>(sum, first, out);
}

template <int kRows>
void float32_pass(const float* weights, const float* activations, int64_t k, int first,
                  const TileOutput& out) {
  __m256 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < k; ++i) {
    __m256 w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = _mm256_load_ps(weights + i * kTileOutputs + first + kLanes * v);
    for (int r = 0; r < kRows; ++r) {
      const __m256 a = _mm256_broadcast_ss(activations + i * kRows + r);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm256_fmadd_ps(a, w[v], sum[r][v]);
    }
  }
  store_pass<kRows>(sum, first, out);
}

void int8_tile(const WeightGroup* weights, const uint8_t* activations, int rows, int64_t num_groups,
               const Prefetch&, const TileOutput& out) {
  for (int first = 0; first < out.num_outputs; first += kPassOutputs) {
    switch (rows) {
      case 1:
        int8_pass<1>(weights, activations, num_groups, first, out);
        break;
      case 2:
        int8_pass<2>(weights, activations, num_groups, first, out);
        break;
      case 3:
        int8_pass<3>(weights, activations, num_groups, first, out);
        break;
      default:
        int8_pass<4>(weights, activations, num_groups, first, out);
    }
  }
}

void float32_tile(const float* weights, const float* activations, int rows, int64_t k, const Prefetch&,
                  const TileOutput& out) {
  for (int first = 0; first < out.num_outputs; first += kPassOutputs) {
    switch (rows) {
      case 1:
        float32_pass<1>(weights, activations, k, first, out);
        break;
      case 2:
        float32_pass<2>(weights, activations, k, first, out);
        break;
      case 3:
        float32_pass<3>(weights, activations, k, first, out);
        break;
      default:
        float32_pass<4>(weights, activations, k, first, out);
    }
  }
}

int32_t total_of(const int8_t (&q)[kGroup]) {
  int32_t total = 0;
  for (int8_t value : q) total += value;
  return total;
}

void quantize_tile(const float* x, int64_t ldx, int rows, int64_t k, uint8_t* activations) {
  for (int64_t first = 0; first < k; first += kGroup) {
    const int64_t count = k - first < kGroup ? k - first : kGroup;
    float* scales = reinterpret_cast<float*>(activations + rows * kGroup);
    int32_t* starts = reinterpret_cast<int32_t*>(scales + rows);
    for (int r = 0; r < rows; ++r) {
      int8_t q[kGroup] = {};
      scales[r] = quantize_group(x + r * ldx + first, count, q);
      starts[r] = -kWeightOffset * total_of(q);
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        std::memcpy(activations + (quad * rows + r) * 4, q + 4 * quad, 4);
      }
    }
    activations += rows * kGroupBytesPerRow;
  }
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
