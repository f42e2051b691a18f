// The Hadamard transform of short blocks of floats: y[i] = Σ ±x[j] over all j of the block.
//
// It is a rotation, but for a factor, so the product of two vectors stays what it was when both are
// transformed, and what stands out in a vector is spread over its block, so that a grid over it can be finer
// (Ashkboos et al., "QuaRot", 2024). Sums are taken in butterflies half a block apart, then a quarter, down
// to neighbours, on every path.
//
// Only static functions, for the reason given in quantize.hpp.
#pragma once

#include <cstdint>

namespace everystop {

// The slow, obvious version: x[size] in place, without a factor, for a power of two.
[[maybe_unused]] static void hadamard(float* x, int64_t size) {
  for (int64_t apart = size / 2; apart > 0; apart /= 2) {
    for (int64_t first = 0; first < size; first += 2 * apart) {
      for (int64_t i = first; i < first + apart; ++i) {
        const float a = x[i], b = x[i + apart];
        x[i] = a + b;
        x[i + apart] = a - b;
      }
    }
  }
}

}  // namespace everystop
