#include "rope.hpp"

#include <cmath>

namespace everystop {

void rope_angles(int64_t position, const float* inv_freq, int64_t half, float factor, float* cosines,
                 float* sines) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i];
    cosines[i] = std::cos(angle) * factor;
    sines[i] = std::sin(angle) * factor;
  }
}

void rotate_half_naive(float* x, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const double a = x[i], b = x[i + half];
    x[i] = static_cast<float>(a * cosines[i] - b * sines[i]);
    x[i + half] = static_cast<float>(b * cosines[i] + a * sines[i]);
  }
}

}  // namespace everystop
