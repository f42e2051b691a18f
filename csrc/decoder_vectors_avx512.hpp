// Vectors of 16 floats in one AVX-512 register. Included only by files compiled for AVX-512; everything is
// local to the including file, so that no other path can be linked to it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "hadamard_avx512.hpp"
#include "kv_cache.hpp"

namespace everystop {
namespace {

// Register tiles of the attention kernel: query vectors × vectors of keys, query vectors × vectors of a
// value.
constexpr int kTileQueries = 6;
constexpr int kTileKeys = 4;
constexpr int kTileDims = 4;

struct Vec16 {
  __m512 v;
};
// 16 pairs of int16, and sums of their products.
struct Pairs16 {
  __m512i v;
};
struct Sums16 {
  __m512i v;
};

inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>((1u << n) - 1u);
}

inline Vec16 zeros() {
  return {_mm512_setzero_ps()};
}
inline Vec16 splat(float x) {
  return {_mm512_set1_ps(x)};
}
inline Vec16 load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline Vec16 load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Lanes n and above are `rest`; nothing beyond p[n - 1] is read.
inline Vec16 load_first(const float* p, int64_t n, float rest) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(rest), first_lanes(n), p)};
}
inline void store(float* p, Vec16 x) {
  _mm512_storeu_ps(p, x.v);
}
inline void store_first(float* p, Vec16 x, int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x.v);
}
inline void store(Half* p, Vec16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec16 add(Vec16 a, Vec16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Vec16 sub(Vec16 a, Vec16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Vec16 mul(Vec16 a, Vec16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Vec16 div(Vec16 a, Vec16 b) {
  return {_mm512_div_ps(a.v, b.v)};
}
// a · b + c
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
// b where either is NaN
inline Vec16 max(Vec16 a, Vec16 b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline Vec16 min(Vec16 a, Vec16 b) {
  return {_mm512_min_ps(a.v, b.v)};
}
// yes where a < b, else no (also where either is NaN)
inline Vec16 select_less(Vec16 a, Vec16 b, Vec16 yes, Vec16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Vec16 keep_first(Vec16 x, int64_t n, float rest) {
  return {_mm512_mask_blend_ps(first_lanes(n), _mm512_set1_ps(rest), x.v)};
}
inline uint32_t greater_mask(Vec16 a, Vec16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
}
inline uint32_t equal_mask(Vec16 a, Vec16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ);
}
// 2^n for integers n = x - 1.5 · 2^23, |n| <= 126
inline Vec16 power_of_two(Vec16 x) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(127)), 23))};
}

// x · 2^n for integers n = shifted - 1.5 · 2^23, where neither x nor that leaves the normal numbers
inline Vec16 times_power_of_two(Vec16 x, Vec16 shifted) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23)))};
}
inline __m256 low_half(__m512 x) {
  return _mm512_castps512_ps256(x);
}
inline __m256 high_half(__m512 x) {
  return _mm512_extractf32x8_ps(x, 1);
}
// The sum of the lanes in a fixed tree: lanes 8 apart, then 4, 2 and 1.
inline float sum_lanes(Vec16 x) {
  const __m256 eight = _mm256_add_ps(low_half(x.v), high_half(x.v));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// The greatest lane; where lanes are NaN, that or any other.
inline float max_lanes(Vec16 x) {
  const __m256 eight = _mm256_max_ps(low_half(x.v), high_half(x.v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// The Hadamard transform of the 16 lanes.
inline Vec16 hadamard_lanes(Vec16 x) {
  return {hadamard_lanes(x.v)};
}

inline Sums16 no_sums() {
  return {_mm512_setzero_si512()};
}
inline Pairs16 load_pairs(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// The pair p[0], p[1] in every place.
inline Pairs16 splat_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
// Adds to each sum both products of a pair of a and one of b. In assembly, since gcc 12 copies the sums to
// and fro around its own intrinsic when most registers hold one.
inline Sums16 add_products(Pairs16 a, Pairs16 b, Sums16 sums) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(a.v), "v"(b.v));
  return sums;
}
inline Vec16 to_floats(Sums16 sums) {
  return {_mm512_cvtepi32_ps(sums.v)};
}
// The integers nearest to x, ties to even, which must fit.
inline void store_rounded(int16_t* p, Vec16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
inline void store_rounded(int8_t* p, Vec16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

}  // namespace
}  // namespace everystop
