// Linear kernels for NEON with the signed byte dot product (ARMv8.2): tiles of up to 3 rows by 32 outputs.
#include <arm_neon.h>

#include <cstring>

#include "linear_kernels.hpp"
#include "quantize.hpp"

namespace everystop {
namespace {

constexpr int kMaxRows = 3;
constexpr int kLanes = 4;
constexpr int kVectors = kTileOutputs / kLanes;

int8x16_t broadcast_quad(const uint8_t* quad) {
  int32_t value;
  std::memcpy(&value, quad, sizeof value);
  return vreinterpretq_s8_s32(vdupq_n_s32(value));
}

template <int kRows>
[[gnu::always_inline]] inline void store_tile(const float32x4_t (&sum)[kRows][kVectors],
                                              const TileOutput& out) {
  for (int r = 0; r < kRows; ++r) {
    float row[kTileOutputs];
    for (int v = 0; v < kVectors; ++v) vst1q_f32(row + kLanes * v, sum[r][v]);
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
                    const TileOutput& out) {
  float32x4_t sum[kRows][kVectors];
  for (auto& row : sum) {
    for (float32x4_t& s : row) s = vdupq_n_f32(0);
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    int32x4_t dot[kRows][kVectors];
    for (auto& row : dot) {
      for (int32x4_t& d : row) d = vdupq_n_s32(0);
    }
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      int8x16_t a[kRows];
      for (int r = 0; r < kRows; ++r) a[r] = broadcast_quad(activations + (quad * kRows + r) * 4);
      for (int v = 0; v < kVectors; ++v) {
        const int8x16_t w = vreinterpretq_s8_u8(vld1q_u8(weights[g].values[quad][kLanes * v]));
        for (int r = 0; r < kRows; ++r) dot[r][v] = vdotq_s32(dot[r][v], w, a[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float scale;
      std::memcpy(&scale, activations + kRows * kGroup + r * sizeof scale, sizeof scale);
      for (int v = 0; v < kVectors; ++v) {
        const float32x4_t scales = vmulq_n_f32(vld1q_f32(weights[g].scales + kLanes * v), scale);
        sum[r][v] = vfmaq_f32(sum[r][v], vcvtq_f32_s32(dot[r][v]), scales);
      }
    }
    activations += kRows * kGroupBytesPerRow;
  }
  store_tile<kRows>(sum, out);
}

template <int kRows>
void float32_tile_rows(const float* weights, const float* activations, int64_t k, const TileOutput& out) {
  float32x4_t sum[kRows][kVectors];
  for (auto& row : sum) {
    for (float32x4_t& s : row) s = vdupq_n_f32(0);
  }
  for (int64_t i = 0; i < k; ++i) {
    float32x4_t a[kRows];
    for (int r = 0; r < kRows; ++r) a[r] = vdupq_n_f32(activations[i * kRows + r]);
    for (int v = 0; v < kVectors; ++v) {
      const float32x4_t w = vld1q_f32(weights + i * kTileOutputs + kLanes * v);
      for (int r = 0; r < kRows; ++r) sum[r][v] = vfmaq_f32(sum[r][v], w, a[r]);
    }
  }
  store_tile<kRows>(sum, out);
}

void int8_tile(const WeightGroup* weights, const uint8_t* activations, int rows, int64_t num_groups,
               const Prefetch&, const TileOutput& out) {
  if (rows == 1) return int8_tile_rows<1>(weights, activations, num_groups, out);
  if (rows == 2) return int8_tile_rows<2>(weights, activations, num_groups, out);
  int8_tile_rows<3>(weights, activations, num_groups, out);
}

void float32_tile(const float* weights, const float* activations, int rows, int64_t k, const Prefetch&,
                  const TileOutput& out) {
  if (rows == 1) return float32_tile_rows<1>(weights, activations, k, out);
  if (rows == 2) return float32_tile_rows<2>(weights, activations, k, out);
  float32_tile_rows<3>(weights, activations, k, out);
}

void quantize_tile(const float* x, int64_t ldx, int rows, int64_t k, uint8_t* activations) {
  quantize_rows(x, ldx, rows, k, 0, activations);
}

int64_t dot_in_registers(int64_t iterations, int32_t* sink) {
  const int8x16_t operand = vreinterpretq_s8_s32(vdupq_n_s32(*sink));
  int32x4_t sum[12];
  for (int32x4_t& s : sum) s = vdupq_n_s32(*sink);
  for (int64_t i = 0; i < iterations; ++i) {
    for (int32x4_t& s : sum) s = vdotq_s32(s, operand, operand);
  }
  for (const int32x4_t& s : sum) *sink ^= vaddvq_s32(s);
  return iterations * 12 * 16;
}

}  // namespace

const LinearKernels& linear_kernels_neon() {
  static constexpr LinearKernels kernels{
      "int8-g64-s8x32-v2", "float32-x32-v1", kMaxRows,  0,
      dot_in_registers,    quantize_tile,    int8_tile, float32_tile,
  };
  return kernels;
}

}  // namespace everystop
