// Vectors of 16 floats for any CPU. Multiply and add stay two roundings: a fused one would be a library call
// where the CPU has none. Everything is local to the including file.
#pragma once

#include <cstdint>
#include <cstring>

#include "hadamard.hpp"
#include "kv_cache.hpp"

namespace everystop {
namespace {

constexpr int kTileQueries = 2;
constexpr int kTileKeys = 1;
constexpr int kTileDims = 1;

// Four of the compiler's own vectors, which every CPU has in some form.
typedef float Floats4 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));

struct Vec16 {
  Floats4 q[4];
};
// 16 pairs of int16, and sums of their products.
struct Pairs16 {
  int16_t of[32];
};
struct Sums16 {
  int32_t of[16];
};

template <class F>
inline Vec16 each(F&& f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Subnormal halves are multiples of 2^-24: their bits beside those of 0.5 give 0.5 + value exactly.
inline float widen_half(uint32_t half) {
  const uint32_t exponent = half & 0x7c00u, sign = (half & 0x8000u) << 16;
  const uint32_t shifted = (half & 0x7fffu) << 13;
  if (exponent == 0) return float_of(sign | bits_of(float_of(0x3f000000u + (shifted >> 13)) - 0.5f));
  return float_of(sign | (shifted + (exponent == 0x7c00u ? 0x70000000u : 0x38000000u)));
}
// Rounds to nearest, ties to even; what is too large becomes infinite, NaN stays NaN.
inline uint16_t narrow_float(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

inline Vec16 splat(float x) {
  const Floats4 v = {x, x, x, x};
  return {{v, v, v, v}};
}
inline Vec16 zeros() {
  return splat(0.0f);
}
inline Vec16 load(const float* p) {
  Vec16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, const Vec16& x) {
  std::memcpy(p, &x, sizeof x);
}
inline Vec16 load(const Half* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = widen_half(p[i].bits);
  return load(lanes);
}
inline Vec16 load_first(const float* p, int64_t n, float rest) {
  float lanes[16];
  for (int64_t i = 0; i < 16; ++i) lanes[i] = i < n ? p[i] : rest;
  return load(lanes);
}
inline void store_first(float* p, const Vec16& x, int64_t n) {
  std::memcpy(p, &x, static_cast<size_t>(n) * sizeof(float));
}
inline void store(Half* p, const Vec16& x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) p[i].bits = narrow_float(lanes[i]);
}
inline Vec16 add(const Vec16& a, const Vec16& b) {
  return each([&](int i) { return a.q[i] + b.q[i]; });
}
inline Vec16 sub(const Vec16& a, const Vec16& b) {
  return each([&](int i) { return a.q[i] - b.q[i]; });
}
inline Vec16 mul(const Vec16& a, const Vec16& b) {
  return each([&](int i) { return a.q[i] * b.q[i]; });
}
inline Vec16 div(const Vec16& a, const Vec16& b) {
  return each([&](int i) { return a.q[i] / b.q[i]; });
}
// a · b + c
inline Vec16 fma(const Vec16& a, const Vec16& b, const Vec16& c) {
  return each([&](int i) { return a.q[i] * b.q[i] + c.q[i]; });
}
// b where either is NaN
inline Vec16 max(const Vec16& a, const Vec16& b) {
  return each([&](int i) { return a.q[i] > b.q[i] ? a.q[i] : b.q[i]; });
}
inline Vec16 min(const Vec16& a, const Vec16& b) {
  return each([&](int i) { return a.q[i] < b.q[i] ? a.q[i] : b.q[i]; });
}
// yes where a < b, else no (also where either is NaN)
inline Vec16 select_less(const Vec16& a, const Vec16& b, const Vec16& yes, const Vec16& no) {
  return each([&](int i) { return a.q[i] < b.q[i] ? yes.q[i] : no.q[i]; });
}
inline Vec16 keep_first(const Vec16& x, int64_t n, float rest) {
  float lanes[16];
  store(lanes, x);
  return load_first(lanes, n, rest);
}
// The sum of the lanes in a fixed tree: lanes 8 apart, then 4, 2 and 1.
inline float sum_lanes(const Vec16& x) {
  float lanes[16];
  store(lanes, x);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
// The greatest lane; where lanes are NaN, that or any other.
inline float max_lanes(const Vec16& x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 1; i < 16; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}
inline uint32_t lanes_of(const Ints4& mask, int first) {
  uint32_t lanes = 0;
  for (int i = 0; i < 4; ++i) lanes |= static_cast<uint32_t>(mask[i] & 1) << (first + i);
  return lanes;
}
inline uint32_t greater_mask(const Vec16& a, const Vec16& b) {
  uint32_t lanes = 0;
  for (int i = 0; i < 4; ++i) lanes |= lanes_of(a.q[i] > b.q[i], 4 * i);
  return lanes;
}
inline uint32_t equal_mask(const Vec16& a, const Vec16& b) {
  uint32_t lanes = 0;
  for (int i = 0; i < 4; ++i) lanes |= lanes_of(a.q[i] == b.q[i], 4 * i);
  return lanes;
}
// 2^n for integers n = x - 1.5 · 2^23, |n| <= 126
inline Vec16 power_of_two(const Vec16& x) {
  uint32_t bits[16];
  std::memcpy(bits, &x, sizeof bits);
  for (uint32_t& b : bits) b = (b + 127u) << 23;
  Vec16 out;
  std::memcpy(&out, bits, sizeof bits);
  return out;
}

// x · 2^n for integers n = shifted - 1.5 · 2^23, where neither x nor that leaves the normal numbers
inline Vec16 times_power_of_two(const Vec16& x, const Vec16& shifted) {
  uint32_t bits[16], powers[16];
  std::memcpy(bits, &x, sizeof bits);
  std::memcpy(powers, &shifted, sizeof powers);
  for (int i = 0; i < 16; ++i) bits[i] += powers[i] << 23;
  Vec16 out;
  std::memcpy(&out, bits, sizeof bits);
  return out;
}

// The Hadamard transform of the 16 lanes.
inline Vec16 hadamard_lanes(const Vec16& x) {
  float lanes[16];
  store(lanes, x);
  hadamard(lanes, 16);
  return load(lanes);
}

inline Sums16 no_sums() {
  return {};
}
inline Pairs16 load_pairs(const int8_t* p) {
  Pairs16 pairs;
  for (int i = 0; i < 32; ++i) pairs.of[i] = p[i];
  return pairs;
}
// The pair p[0], p[1] in every place.
inline Pairs16 splat_pair(const int16_t* p) {
  Pairs16 pairs;
  for (int i = 0; i < 32; ++i) pairs.of[i] = p[i % 2];
  return pairs;
}
// Adds to each sum both products of a pair of a and one of b; wraps around where they are too large.
inline Sums16 add_products(const Pairs16& a, const Pairs16& b, const Sums16& sums) {
  Sums16 out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t products = static_cast<uint32_t>(a.of[2 * i] * b.of[2 * i]) +
                              static_cast<uint32_t>(a.of[2 * i + 1] * b.of[2 * i + 1]);
    out.of[i] = static_cast<int32_t>(static_cast<uint32_t>(sums.of[i]) + products);
  }
  return out;
}
inline Vec16 to_floats(const Sums16& sums) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(sums.of[i]);
  return load(lanes);
}
// The integers nearest to x, ties to even, which must fit.
inline void store_rounded(int16_t* p, const Vec16& x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>(bits_of(lanes[i] + 12582912.0f));
}
inline void store_rounded(int8_t* p, const Vec16& x) {
  int16_t wide[16];
  store_rounded(wide, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(wide[i]);
}

}  // namespace
}  // namespace everystop
