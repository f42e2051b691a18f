// Symmetric quantisation of groups of floats: q = round(x · levels / max|x|), x ≈ q · scale; int8 has 127
// levels. Groups of a linear layer's inputs are spread before, see hadamard.hpp: of its weights and of what
// they meet.
//
// Only static functions: files compiled for different instruction sets include this, and a shared inline
// function would be linked from any one of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "hadamard.hpp"
#include "linear_kernels.hpp"

namespace everystop {

constexpr float kHadamardScale = 0.125f;  // its square is 1 / kGroup
static_assert(kGroup == 64);

// Groups whose largest magnitude is below this become zeros: levels / max|x| might overflow.
constexpr float kSmallestMagnitude = 1e-30f;

[[maybe_unused]] static uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// max|x| over x[count]; NaN if any is NaN. Magnitudes are compared as integers, where NaN is the largest.
[[maybe_unused]] static float largest_magnitude(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  float value;
  std::memcpy(&value, &largest, sizeof value);
  return value;
}

// The integer nearest to x, ties to even, for |x| < 2^22.
[[maybe_unused]] static int32_t nearest_integer(float x) {
  return static_cast<int32_t>(float_bits(x + 12582912.0f)) - 0x4b400000;
}

// A number x is x · inverse steps of a grid, and a step is worth `step`.
struct Grid {
  float inverse, step;
};

// The grid that reaches from -levels to levels over x[count]. The step of a group with a NaN or infinity is
// NaN or infinity (and what is rounded to it arbitrary), so that what is computed from it is not finite
// either.
[[maybe_unused]] static Grid grid_over(const float* x, int64_t count, float levels) {
  const float largest = largest_magnitude(x, count);
  if (largest < kSmallestMagnitude) return {0.0f, 0.0f};
  return {levels / largest, largest / levels};
}

// Quantises x[count] into q[count], from -levels to levels, and returns the scale.
template <class Integer>
[[maybe_unused]] static float quantize_to(const float* x, int64_t count, float levels, Integer* q) {
  const Grid grid = grid_over(x, count, levels);
  for (int64_t i = 0; i < count; ++i) q[i] = static_cast<Integer>(nearest_integer(x[i] * grid.inverse));
  return grid.step;
}

// Transforms x[count], with zeros up to a whole group, and quantises it into q[kGroup]. Returns the scale,
// with this side's share of the transform's factor in it.
[[maybe_unused]] static float quantize_group(const float* x, int64_t count, int8_t* q) {
  float spread[kGroup] = {};
  std::memcpy(spread, x, static_cast<size_t>(count) * sizeof(float));
  hadamard(spread, kGroup);
  return quantize_to(spread, kGroup, 127.0f, q) * kHadamardScale;
}

// Quantises `rows` rows of x [rows, k], ldx floats apart, into one tile of activations (see
// linear_kernels.hpp).
[[maybe_unused]] static void quantize_rows(const float* x, int64_t ldx, int rows, int64_t k,
                                           int weight_offset, uint8_t* activations) {
  for (int64_t first = 0; first < k; first += kGroup) {
    const int64_t count = k - first < kGroup ? k - first : kGroup;
    float* scales = reinterpret_cast<float*>(activations + rows * kGroup);
    int32_t* starts = reinterpret_cast<int32_t*>(scales + rows);
    for (int r = 0; r < rows; ++r) {
      int8_t q[kGroup];
      scales[r] = quantize_group(x + r * ldx + first, count, q);
      int32_t total = 0;
      for (int8_t value : q) total += value;
      starts[r] = -weight_offset * total;
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        std::memcpy(activations + (quad * rows + r) * 4, q + 4 * quad, 4);
      }
    }
    activations += rows * kGroupBytesPerRow;
  }
}

}  // namespace everystop
