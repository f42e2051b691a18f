// 2^x and the gated activation over Vec16; included once by each instruction-set path.
#pragma once

namespace everystop {
namespace {

// 2^x for -125 <= x <= 126, clamped there, NaN kept; within 4e-9 of relative error before rounding.
//
// x = n + f with n the nearest integer; 2^f on [-1/2, 1/2] is a polynomial of degree 6 fitted to least
// relative error with its constant held at 1, so that 2^0 is exactly 1.
inline Vec16 exp2_clamped(Vec16 x) {
  x = min(splat(126.0f), max(splat(-125.0f), x));
  const Vec16 magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Vec16 shifted = add(x, magic);
  const Vec16 f = sub(x, sub(shifted, magic));
  Vec16 p = splat(1.5353361709e-04f);
  p = fma(p, f, splat(1.3398874452e-03f));
  p = fma(p, f, splat(9.6184373588e-03f));
  p = fma(p, f, splat(5.5503324710e-02f));
  p = fma(p, f, splat(2.4022647914e-01f));
  p = fma(p, f, splat(6.9314720286e-01f));
  p = fma(p, f, splat(1.0f));
  return mul(p, power_of_two(shifted));
}

// 2^x for x <= 126; exactly 0 below -125.
inline Vec16 exp2_or_zero(Vec16 x) {
  return select_less(x, splat(-125.0f), zeros(), exp2_clamped(x));
}

inline float exp2_or_zero(float x) {
  float lanes[16];
  store(lanes, exp2_or_zero(splat(x)));
  return lanes[0];
}

inline Vec16 silu_mul(Vec16 gate, Vec16 up) {
  const Vec16 e = exp2_clamped(mul(gate, splat(-1.44269504f)));
  return mul(div(gate, add(splat(1.0f), e)), up);
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, silu_mul(load(gate + i), load(up + i)));
  if (i < n) {
    const Vec16 v = silu_mul(load_first(gate + i, n - i, 0.0f), load_first(up + i, n - i, 0.0f));
    store_first(out + i, v, n - i);
  }
}

}  // namespace
}  // namespace everystop
