// The Hadamard transform of a head over Vec16; included once by each instruction-set path.
#pragma once

#include <cmath>

namespace everystop {
namespace {

// kVectors vectors as one block, times `factor`.
template <int kVectors>
inline void hadamard_block(float* x, float factor) {
  Vec16 v[kVectors];
  for (int i = 0; i < kVectors; ++i) v[i] = load(x + 16 * i);
  for (int apart = kVectors / 2; apart > 0; apart /= 2) {
    for (int i = 0; i < kVectors; ++i) {
      if ((i & apart) != 0) continue;
      const Vec16 a = v[i], b = v[i + apart];
      v[i] = add(a, b);
      v[i + apart] = sub(a, b);
    }
  }
  for (int i = 0; i < kVectors; ++i) store(x + 16 * i, mul(hadamard_lanes(v[i]), splat(factor)));
}

void spread(float* x, int64_t n) {
  const int64_t vectors = n % 64 == 0 ? 4 : n % 32 == 0 ? 2 : n % 16 == 0 ? 1 : 0;
  if (vectors == 0) return;
  const float factor = 1.0f / std::sqrt(static_cast<float>(16 * vectors));
  for (int64_t i = 0; i < n; i += 16 * vectors) {
    if (vectors == 4) {
      hadamard_block<4>(x + i, factor);
    } else if (vectors == 2) {
      hadamard_block<2>(x + i, factor);
    } else {
      hadamard_block<1>(x + i, factor);
    }
  }
}

}  // namespace
}  // namespace everystop
