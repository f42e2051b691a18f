// Vectors of 16 floats in two AVX2 registers. Included only by files compiled for AVX2; everything is local
// to the including file, so that no other path can be linked to it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kv_cache.hpp"

namespace everystop {
namespace {

constexpr int kTileQueries = 6;
constexpr int kTileKeys = 1;
constexpr int kTileDims = 1;

struct Vec16 {
  __m256 lo, hi;
};
// 16 pairs of int16, and sums of their products.
struct Pairs16 {
  __m256i lo, hi;
};
struct Sums16 {
  __m256i lo, hi;
};

inline Vec16 zeros() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline Vec16 splat(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline Vec16 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline Vec16 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Vec16 load_first(const float* p, int64_t n, float rest) {
  float lanes[16];
  for (int64_t i = 0; i < 16; ++i) lanes[i] = i < n ? p[i] : rest;
  return load(lanes);
}
inline void store(float* p, Vec16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline void store_first(float* p, Vec16 x, int64_t n) {
  float lanes[16];
  store(lanes, x);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}
inline void store(Half* p, Vec16 x) {
  constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.lo, rounding));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.hi, rounding));
}
inline Vec16 add(Vec16 a, Vec16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Vec16 sub(Vec16 a, Vec16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Vec16 mul(Vec16 a, Vec16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Vec16 div(Vec16 a, Vec16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// a · b + c
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// b where either is NaN
inline Vec16 max(Vec16 a, Vec16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline Vec16 min(Vec16 a, Vec16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
// yes where a < b, else no (also where either is NaN)
inline Vec16 select_less(Vec16 a, Vec16 b, Vec16 yes, Vec16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline Vec16 keep_first(Vec16 x, int64_t n, float rest) {
  const __m256 count = _mm256_set1_ps(static_cast<float>(n));
  const __m256 low = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 high = _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15);
  return select_less({low, high}, {count, count}, x, splat(rest));
}
inline uint32_t greater_mask(Vec16 a, Vec16 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)) |
                               _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)) << 8);
}
inline uint32_t equal_mask(Vec16 a, Vec16 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ)) |
                               _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)) << 8);
}
// 2^n for integers n = x - 1.5 · 2^23, |n| <= 126
inline Vec16 power_of_two(Vec16 x) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(x.lo), bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(x.hi), bias), 23))};
}

// x · 2^n for integers n = shifted - 1.5 · 2^23, where neither x nor that leaves the normal numbers
inline __m256 times_power_of_two(__m256 x, __m256 shifted) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
inline Vec16 times_power_of_two(Vec16 x, Vec16 shifted) {
  return {times_power_of_two(x.lo, shifted.lo), times_power_of_two(x.hi, shifted.hi)};
}
// The sum of the lanes in a fixed tree: lanes 8 apart, then 4, 2 and 1.
inline float sum_lanes(Vec16 x) {
  const __m256 eight = _mm256_add_ps(x.lo, x.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The greatest lane; where lanes are NaN, that or any other.
inline float max_lanes(Vec16 x) {
  const __m256 eight = _mm256_max_ps(x.lo, x.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The Hadamard transform of the 16 lanes.
inline __m256 hadamard_lanes(__m256 x) {
  const __m256 swapped = _mm256_permute2f128_ps(x, x, 1);
  x = _mm256_blend_ps(_mm256_add_ps(x, swapped), _mm256_sub_ps(swapped, x), 0xf0);
  const __m256 pairs = _mm256_permute_ps(x, 0x4e);
  x = _mm256_blend_ps(_mm256_add_ps(x, pairs), _mm256_sub_ps(pairs, x), 0xcc);
  const __m256 neighbours = _mm256_permute_ps(x, 0xb1);
  return _mm256_blend_ps(_mm256_add_ps(x, neighbours), _mm256_sub_ps(neighbours, x), 0xaa);
}
inline Vec16 hadamard_lanes(Vec16 x) {
  return {hadamard_lanes(_mm256_add_ps(x.lo, x.hi)), hadamard_lanes(_mm256_sub_ps(x.lo, x.hi))};
}

inline Sums16 no_sums() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
inline Pairs16 load_pairs(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
// The pair p[0], p[1] in every place.
inline Pairs16 splat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
// Adds to each sum both products of a pair of a and one of b.
inline Sums16 add_products(Pairs16 a, Pairs16 b, Sums16 sums) {
  return {_mm256_add_epi32(sums.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sums.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
inline Vec16 to_floats(Sums16 sums) {
  return {_mm256_cvtepi32_ps(sums.lo), _mm256_cvtepi32_ps(sums.hi)};
}
// The integers nearest to x, ties to even, which must fit.
inline void store_rounded(int16_t* p, Vec16 x) {
  const __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(halves, 0xd8));
}
inline void store_rounded(int8_t* p, Vec16 x) {
  int16_t wide[16];
  store_rounded(wide, x);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(wide[i]);
}

}  // namespace
}  // namespace everystop
