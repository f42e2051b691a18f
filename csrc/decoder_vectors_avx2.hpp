// Vectors of 16 floats in two AVX2 registers. Included only by files compiled for AVX2; everything is local
// to the including file, so that no other path can be linked to it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kv_cache.hpp"

namespace everystop {
namespace {

constexpr int kTileQueries = 6;
constexpr int kTileKeys = 1;
constexpr int kTileDims = 1;

struct Vec16 {
  __m256 lo, hi;
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
inline Vec16 load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
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

}  // namespace
}  // namespace everystop
