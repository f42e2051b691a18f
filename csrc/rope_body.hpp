// Rotation of one head over Vec16; included once by each instruction-set path. Every lane does the same
// arithmetic.
#pragma once

namespace everystop {
namespace {

void rotate_half(float* x, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i;
    const bool whole = n >= 16;
    const Vec16 a = whole ? load(x + i) : load_first(x + i, n, 0.0f);
    const Vec16 b = whole ? load(x + half + i) : load_first(x + half + i, n, 0.0f);
    const Vec16 c = whole ? load(cosines + i) : load_first(cosines + i, n, 0.0f);
    const Vec16 s = whole ? load(sines + i) : load_first(sines + i, n, 0.0f);
    const Vec16 first = sub(mul(a, c), mul(b, s));
    const Vec16 second = add(mul(b, c), mul(a, s));
    if (whole) {
      store(x + i, first);
      store(x + half + i, second);
    } else {
      store_first(x + i, first, n);
      store_first(x + half + i, second, n);
    }
  }
}

}  // namespace
}  // namespace everystop
