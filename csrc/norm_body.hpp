// RMSNorm over Vec16; included once by each instruction-set path.
//
// Squares are summed in four chains of 16 lanes: element i belongs to lane i mod 16 of chain (i / 16) mod 4.
#pragma once

namespace everystop {
namespace {

inline float sum_of_squares(const float* x, int64_t n) {
  Vec16 chains[4] = {zeros(), zeros(), zeros(), zeros()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int c = 0; c < 4; ++c) {
      const Vec16 v = load(x + i + 16 * c);
      chains[c] = fma(v, v, chains[c]);
    }
  }
  for (int c = 0; i < n; i += 16, ++c) {
    const Vec16 v = n - i >= 16 ? load(x + i) : load_first(x + i, n - i, 0.0f);
    chains[c] = fma(v, v, chains[c]);
  }
  return sum_lanes(add(add(chains[0], chains[1]), add(chains[2], chains[3])));
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const Vec16 factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < n) {
    const Vec16 v = mul(mul(load_first(x + i, n - i, 0.0f), factor), load_first(weight + i, n - i, 0.0f));
    store_first(out + i, v, n - i);
  }
}

void add_in_place(float* x, const float* delta, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(x + i, add(load(x + i), load(delta + i)));
  for (; i < n; ++i) x[i] += delta[i];
}

void add_rms_norm(float* x, const float* delta, const float* weight, int64_t n, float eps, float* out) {
  add_in_place(x, delta, n);
  rms_norm(x, weight, n, eps, out);
}

}  // namespace
}  // namespace everystop
