// Passes over a row of logits with Vec16; included once by each instruction-set path.
#pragma once

#include "activation_body.hpp"
#include "attention_body.hpp"
#include "norm_body.hpp"

namespace everystop {
namespace {

constexpr int64_t kRun = 256;

inline Vec16 load_upto(const float* x, int64_t i, int64_t n, float rest) {
  return n - i >= 16 ? load(x + i) : load_first(x + i, n - i, rest);
}

float max_of(const float* x, int64_t n, bool* finite) {
  const float lowest = -__builtin_inff();
  Vec16 top = splat(lowest), differences = zeros();  // x - x is 0 where x is finite, else NaN
  for (int64_t i = 0; i < n; i += 16) {
    const Vec16 v = load_upto(x, i, n, x[0]);
    top = max(top, v);
    differences = add(differences, sub(v, v));
  }
  *finite = sum_lanes(differences) == 0.0f;
  return max_lanes(top);
}

int64_t index_of(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += 16) {
    const uint32_t mask = equal_mask(load_upto(x, i, n, __builtin_nanf("")), splat(value));
    if (mask != 0) return i + __builtin_ctz(mask);
  }
  return n;
}

int64_t count_greater(const float* x, int64_t n, float value) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    count += __builtin_popcount(greater_mask(load_upto(x, i, n, -__builtin_inff()), splat(value)));
  }
  return count;
}

int64_t next_greater(const float* x, int64_t first, int64_t n, float value) {
  for (int64_t i = first; i < n; i += 16) {
    const uint32_t mask = greater_mask(load_upto(x, i, n, -__builtin_inff()), splat(value));
    if (mask != 0) return i + __builtin_ctz(mask);
  }
  return n;
}

double exp2_of(const float* x, int64_t n, float shift, float scale, float* out, float* run_sums) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = n - begin < kRun ? n : begin + kRun;
    Vec16 sum = zeros();
    for (int64_t i = begin; i < end; i += 16) {
      const Vec16 v = mul(sub(load_upto(x, i, end, -__builtin_inff()), splat(shift)), splat(scale));
      const Vec16 weight = exp2_or_zero(v);
      if (out != nullptr) store_first(out + i, weight, end - i < 16 ? end - i : 16);
      sum = add(sum, weight);
    }
    const float run = sum_lanes(sum);
    if (run_sums != nullptr) run_sums[begin / kRun] = run;
    total += static_cast<double>(run);
  }
  return total;
}

}  // namespace
}  // namespace everystop
